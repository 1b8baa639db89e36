"""Sessions, requests and the engine's steps over time, for Perfetto and Chrome.

Each session and request takes the first track that is free when it begins.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from measure.enginesteps import EngineStep, read_steps
from measure.metrics.sessions import session_order
from measure.runs import STATUSES, UNKNOWN, Run
from report.files.measured import Lacking, Measured, Writer
from tracefile.records.arrays import FloatArray, IntArray

SESSIONS: Final = 1
REQUESTS: Final = 2
ENGINE: Final = 3
"""Process ids of the groups of tracks."""


def tracks(begins: FloatArray, ends: FloatArray) -> IntArray:
    """Return the track, from 0, of each span: the lowest that is free."""
    found = np.zeros(len(begins), np.int64)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for place in np.argsort(begins, kind="stable").tolist():
        while busy and busy[0][0] <= begins[place]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        track = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (float(ends[place]), track))
        found[place] = track
    return found


def _slice(name: str, process: int, track: int, span_ms: tuple[float, float], **told: Any) -> dict[str, Any]:
    begin_ms, end_ms = span_ms
    known = {key: value for key, value in told.items() if value is not None and value != UNKNOWN}
    event = {"name": name, "ph": "X", "pid": process, "tid": track + 1}
    return event | {"ts": round(begin_ms * 1000, 3), "dur": round((end_ms - begin_ms) * 1000, 3), "args": known}


def events(run: Run) -> Iterator[dict[str, Any]]:
    """Return names of the two groups, then sessions, then requests with their prefill and decode inside."""
    kept = run.select(np.flatnonzero(~np.isnan(run.end_ms)))
    if not len(kept):
        raise Lacking("no request has its times (arrival_ms, e2e_ms)")
    for process, name in ((SESSIONS, "sessions"), (REQUESTS, "requests")):
        yield _process(process, name)
    yield from _sessions(kept)
    yield from _requests(kept)


def _sessions(run: Run) -> Iterator[dict[str, Any]]:
    order = session_order(run)
    firsts = order.rows[order.starts]
    begins_ms, ends_ms = run.arrival_ms[firsts], np.maximum.reduceat(run.end_ms[order.rows], order.starts)
    counts = np.diff(np.append(order.starts, len(order.rows))).tolist()
    for place, track in enumerate(tracks(begins_ms, ends_ms).tolist()):
        row = firsts[place]
        span_ms = float(begins_ms[place]), float(ends_ms[place])
        yield _slice(run.sessions[row] or run.request_ids[row], SESSIONS, track, span_ms, requests=counts[place])


def _requests(run: Run) -> Iterator[dict[str, Any]]:
    for row, track in enumerate(tracks(run.arrival_ms, run.end_ms).tolist()):
        begin_ms, end_ms, ttft_ms = (float(one[row]) for one in (run.arrival_ms, run.end_ms, run.ttft_ms))
        yield _slice(
            run.request_ids[row],
            REQUESTS,
            track,
            (begin_ms, end_ms),
            session=run.sessions[row],
            turn=int(run.turn[row]),
            status=STATUSES[run.status[row]],
            prompt_tokens=int(run.prompt_tokens[row]),
            cached_tokens=int(run.cached_tokens[row]),
            output_tokens=int(run.output_tokens[row]),
        )
        first_ms = min(begin_ms + ttft_ms, end_ms)
        if first_ms >= begin_ms:  # not NaN
            yield _slice("to first token", REQUESTS, track, (begin_ms, first_ms))
            yield _slice("decode", REQUESTS, track, (first_ms, end_ms))


def step_events(steps: Iterable[EngineStep]) -> Iterator[dict[str, Any]]:
    """Return the engine's steps by kind, and what runs, waits and is held after each."""
    yield _process(ENGINE, "engine")
    for step in steps:
        end_ms = step.start_ms + step.duration_ms
        kinds = [kind for kind, count in (("prefill", step.prefill_tokens), ("decode", step.decodes)) if count]
        told = {name: getattr(step, name) for name in ("prefill_tokens", "decodes", "decode_kv_tokens")}
        yield _slice(" + ".join(kinds) or "step", ENGINE, 0, (step.start_ms, end_ms), **told)
        for name in ("running", "waiting", "used_blocks"):
            counted = {"ph": "C", "pid": ENGINE, "ts": round(end_ms * 1000, 3)}
            yield {"name": name.replace("_", " "), **counted, "args": {name: getattr(step, name)}}


def _process(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def _write_timeline(measured: Measured, path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        steps = () if measured.steps is None else step_events(read_steps(measured.steps))
        for number, event in enumerate(chain(events(measured.run), steps)):
            file.write((b",\n" if number else b"\n") + msgspec.json.encode(event))
        file.write(b"\n]}\n")


FILES: dict[str, Writer] = {"timeline.json": _write_timeline}
"""Writers by file name."""
