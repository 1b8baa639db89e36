"""Workers' traces merged into one trace: in finish order, one header, requests in flight counted over all workers.

Each worker writes its trace (``run.jsonl.part0.jsonl``). The merged trace replaces the target once it is on disk; then
the parts are removed. Lines pass through unchanged: memory holds two numbers a request.
"""

import heapq
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from tracefile.records.decoding import is_header, is_object
from tracefile.records.encoding import encode_meta
from tracefile.records.schema import Meta
from tracefile.storage.appending import TraceFile, new_atomic_file
from tracefile.storage.lines import LineReader
from tracefile.storage.output import refuse_inputs

CONCURRENCY = re.compile(rb'"concurrency":\d+')
"""First match is the record's field: known fields come first, and quotes within values are escaped."""


class Times(msgspec.Struct, frozen=True):
    """Arrival and E2E latency of a request, from its line."""

    arrival_ms: float | None = None
    e2e_ms: float | None = None


_times = msgspec.json.Decoder(Times)


def part_path(trace: Path, worker: int) -> Path:
    return trace.with_name(f"{trace.name}.part{worker}.jsonl")


def part_paths(trace: Path) -> list[Path]:
    named = re.compile(re.escape(trace.name) + r"\.part(\d+)\.jsonl")
    matches = ((named.fullmatch(path.name), path) for path in trace.parent.iterdir()) if trace.parent.is_dir() else ()
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def refuse_lost_inputs(trace: Path, inputs: Iterable[Path | None]) -> None:
    """Raise InputError if a run that writes ``trace`` would overwrite one of its input files."""
    paths = [path for path in inputs if path is not None]
    for path in (trace, *part_paths(trace)):
        refuse_inputs(path, paths)


def merge_parts(trace: Path, parts: Sequence[Path], meta: Meta) -> int:
    """Merge the parts into ``trace``, and remove them. Raises InputError; then every part still exists."""
    in_flight = InFlight.of(parts)
    file = new_atomic_file(trace, overwrite=True)
    try:
        count = _write_all(file, parts, meta, in_flight)
        file.finish()
    finally:
        file.abandon()
    for part in parts:
        part.unlink(missing_ok=True)
    return count


class InFlight:
    """Requests in flight at a time (the engine's batch and queue), over all parts."""

    def __init__(self, arrivals_ms: Iterable[float], ends_ms: Iterable[float]) -> None:
        self._arrivals_ms = array("d", sorted(arrivals_ms))
        self._ends_ms = array("d", sorted(ends_ms))

    @classmethod
    def of(cls, parts: Iterable[Path]) -> "InFlight":
        arrivals_ms, ends_ms = array("d"), array("d")
        for part in parts:
            for times in map(_times.decode, record_lines(part)):
                if times.arrival_ms is not None and times.e2e_ms is not None:
                    arrivals_ms.append(times.arrival_ms)
                    ends_ms.append(times.arrival_ms + times.e2e_ms)
        return cls(arrivals_ms, ends_ms)

    def at_arrival(self, times: Times) -> int | None:
        """Requests in flight at this arrival, itself included; null: arrival unknown."""
        if times.arrival_ms is None or times.e2e_ms is None:
            return None
        ended = bisect_right(self._ends_ms, times.arrival_ms) - (times.e2e_ms == 0.0)
        return bisect_right(self._arrivals_ms, times.arrival_ms) - ended


def record_lines(part: Path) -> Iterator[bytes]:
    """Record lines of a part, without a torn last line."""
    if not part.exists():
        return
    with LineReader(part) as lines:
        for line in lines:
            if (lines.complete or is_object(line)) and not is_header(line):
                yield line


def _write_all(file: TraceFile, parts: Sequence[Path], meta: Meta, in_flight: InFlight) -> int:
    file.add(encode_meta(meta))
    records = 0
    for _, times, line in heapq.merge(*map(_timed_lines, parts), key=lambda timed: timed[0]):
        count = in_flight.at_arrival(times)
        file.add((line if count is None else CONCURRENCY.sub(b'"concurrency":%d' % count, line, count=1)) + b"\n")
        records += 1
        if file.failing:
            file.drain()
    return records


def _timed_lines(part: Path) -> Iterator[tuple[float, Times, bytes]]:
    """Lines with their end times; a line without an end keeps its position."""
    ended_ms = 0.0
    for line in record_lines(part):
        times = _times.decode(line)
        if times.arrival_ms is not None and times.e2e_ms is not None:
            ended_ms = times.arrival_ms + times.e2e_ms
        yield ended_ms, times, line
