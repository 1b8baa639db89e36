"""``sim watch``: hold a latency model to a trace while it is written, or to one that is there, minute by minute."""

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from measure import wording
from measure.modelstate import (
    COHORTS,
    ModelState,
    TtftRow,
    clock_text,
    drift_sentence,
    encode_state,
    estimate_text,
    is_pace_uncertain,
    is_within,
    pace_text,
)
from measure.table import table_lines
from measure.thresholds import BELOW_SATURATION, TOO_UNCERTAIN
from sim.forecast.scenarios import checked_members
from sim.vllm.config import add_engine_flags, engine_overrides
from tracefile import InputError, open_trace
from tracefile.commandline.durations import duration
from tracefile.commandline.ending import verdict_code
from tracefile.commandline.parser import seed
from tracefile.files.reading import FollowedTrace, wait_for_more
from tracefile.records.latenames import LateModule
from tracefile.records.schema import Meta, Record
from tracefile.storage.output import STATE, check_output, replace_output
from tracefile.storage.segments import trace_after

if TYPE_CHECKING:
    from sim.watch import modelwatch
    from sim.watch.modelwatch import ModelWatch, WatchConfig
else:  # numpy, which the flags need not
    modelwatch = LateModule("sim.watch.modelwatch")

NICENESS = 15
POLL_S = 1.0
REST = 19.0
"""Pause after a judgement of a trace that is followed, in its CPU time: a twentieth of a core at most."""


QUIET_S = 60.0
"""Time without a record after which the wait is told, once."""


@dataclass(frozen=True, slots=True)
class Output:
    """Places that judgements go to."""

    file: Path | None
    json: bool
    follow: bool


EPILOG = "examples:\n  sim watch tap.jsonl.zst --latency-model model.json --follow\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="the trace: a file, or the name of a trace in segments")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim fit; read again if new")
    parser.add_argument(
        "--follow", action="store_true", help="go on as the trace grows, at low priority, until Ctrl-C (default: end)"
    )
    parser.add_argument("--window", type=duration, default="10m", help="time that is judged")
    parser.add_argument("--every", type=duration, default="1m", help="time between judgements")
    parser.add_argument("--members", type=int, default=20, help="forecasts per judgement")
    parser.add_argument("--seed", type=seed, default=0, help="of the members and their noise")
    parser.add_argument("-o", "--output", type=Path, metavar="STATE", help="JSON file to keep the last judgement in")
    parser.add_argument("--json", action="store_true", help="print a JSON object per judgement; words go to stderr")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Judge until the trace ends; 1 if the model has drifted by then, 3 if the last pace is too uncertain to say."""
    for flag in ("window", "every"):
        if not getattr(arguments, flag) > 0:
            raise InputError(f"--{flag} {getattr(arguments, flag):g}: expected more than 0")
    config = modelwatch.WatchConfig(
        trace=arguments.trace,
        model=arguments.latency_model,
        overrides=engine_overrides(arguments),
        window_ms=1e3 * arguments.window,
        every_ms=1e3 * arguments.every,
        members=checked_members(arguments.members),
        seed=arguments.seed,
    )
    check_output(arguments.output, STATE, [config.trace, config.model], "--output")
    output = Output(arguments.output, arguments.json, arguments.follow)
    try:
        watch = modelwatch.ModelWatch(config)
        if output.follow:
            os.nice(NICENESS)
        told, state = False, None
        for state in _judgements(watch, config, follow=output.follow):
            _publish(output, state)
            told = _tell_drift(state, told=told)
        return verdict_code(failed=told, uncertain=state is not None and is_pace_uncertain(state))
    except InputError as error:
        if output.file is not None:
            state = ModelState(model=config.model.name, allowed=(1.0, 1.0), problem=str(error))
            replace_output(output.file, encode_state(state), STATE, "--output")
        raise


def _judgements(watch: "ModelWatch", config: "WatchConfig", *, follow: bool) -> Iterator[ModelState]:
    if follow:
        yield from _followed(watch, config.trace)
        return
    taken = False
    for record, meta in _records(config.trace):
        taken = True
        watch.take(record, meta)
        if watch.is_due:
            yield watch.judge()
    if not taken:
        raise InputError(f"{config.trace}: no records; expected at least one request")
    if watch.has_news:
        if watch.is_empty:
            raise InputError(f"{config.trace}: no request with an arrival and an end; expected a capture")
        yield watch.judge()


def _records(path: Path) -> Iterator[tuple[Record, Meta]]:
    with open_trace(path) as reader:
        for record in reader:
            yield record, reader.latest_meta
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)


def _followed(watch: "ModelWatch", path: Path) -> Iterator[ModelState]:
    rest_s, quiet_s = 0.0, QUIET_S  # told when the trace has been read to its end
    requests, until_ms = 0, 0.0
    with closing(FollowedTrace(path)) as trace:
        while True:
            for record in trace.new_records():
                assert trace.meta is not None
                watch.take(record, trace.meta)
                quiet_s = quiet_s if quiet_s == QUIET_S else 0.0
                requests, until_ms = requests + 1, max(until_ms, record.arrival_ms or 0.0)
            if quiet_s == QUIET_S:
                print(_waiting(path, trace.meta, requests, until_ms), file=sys.stderr, flush=True)
            if watch.is_due and rest_s <= 0.0:
                begun_s = _cpu_s()
                yield watch.judge()
                rest_s = REST * (_cpu_s() - begun_s)
            if not wait_for_more(POLL_S):
                return
            rest_s -= POLL_S
            quiet_s += POLL_S


def _waiting(path: Path, meta: Meta | None, requests: int, until_ms: float) -> str:
    epoch_ns = None if meta is None else meta.epoch_unix_ns
    until = f"{until_ms / 1e3:,.0f} s" if epoch_ns is None else f"{_time_words(epoch_ns / 1e9 + until_ms / 1e3)} UTC"
    told = f"{path}: {requests:,} requests read, until {until}; waiting for more"
    after = None if path.is_dir() else trace_after(path)
    return told if after is None else f"{told}: the tap goes on under another key in {after}, which needs its own watch"


def _time_words(unix_s: float) -> str:
    """Return a moment in UTC to the minute."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")


def _cpu_s() -> float:
    return sum(os.times()[:2])


def _publish(output: Output, state: ModelState) -> None:
    if output.file is not None:
        replace_output(output.file, encode_state(state), STATE, "--output")
    if output.json:
        sys.stdout.write(encode_state(state).decode())
    print("\n".join(describe(state)), file=sys.stderr if output.json else None, flush=True)


def _tell_drift(state: ModelState, *, told: bool) -> bool:
    """Say on stderr, once each, that the model has drifted, and that it has no longer."""
    if state.drifted != told:
        said = drift_sentence(state) or f"the model fits again: steps take {pace_text(state)} of its time"
        print(f"sim watch: {said}", file=sys.stderr, flush=True)
    return state.drifted


def describe(state: ModelState) -> list[str]:
    """Return a judgement as lines: the pace, a table of TTFT, one of cache sizes, notes."""
    low, high = state.allowed
    lines = [
        f"{clock_text(state, state.until_ms)}: {state.requests:,} requests since {clock_text(state, state.from_ms)}; "
        f"pace {pace_text(state)}, expected {low:.2f} to {high:.2f}{' · DRIFTED' if state.drifted else ''}"
    ]
    rows = [_ttft_cells(row) for row in state.ttft]
    if rows:
        lines += table_lines(["TTFT", "n", "", "seen", "predicted", "at this pace", ""], rows, "<>>>>><")
    sizes = [
        [row.cache, f"{row.num_gpu_blocks:,}", wording.share(row.hit_rate)]
        + ([estimate_text(one) for one in row.ttft.values()] or [row.withheld or wording.NOTHING])
        for row in state.caches
    ]
    if sizes:
        widest = max(map(len, sizes))
        lines += table_lines(
            ["cache", "num_gpu_blocks", "hits", "TTFT p50", "p90", "p99"][:widest],
            [row + [""] * (widest - len(row)) for row in sizes],
        )
    return lines + [f"  {note}" for note in state.notes]


def _ttft_cells(row: TtftRow) -> list[str]:
    first = row.level == "p50"
    seen = wording.NOTHING if row.seen_ms is None else wording.duration(row.seen_ms)
    cohort = [COHORTS[row.cohort], f"{row.n:,}"] if first else ["", ""]
    forecast = row.at_pace or row.predicted
    within = {True: "within", False: "outside", None: ""}[is_within(row.seen_ms, forecast)]
    if within == "within" and forecast.reach > BELOW_SATURATION.get(row.level, math.inf):
        within = TOO_UNCERTAIN
    return [*cohort, row.level, seen, estimate_text(row.predicted), estimate_text(row.at_pace), within]
