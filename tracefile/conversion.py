"""``tracefile convert``: one trace out of one or several, in steps.

The steps, in order: join, sessions, time range, block size, anonymize, write. A step takes records that it may
read as often as it needs, and returns such records; what is read once needs constant memory.
"""

import contextlib
import heapq
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tracefile.analysis.anonymity import ROUNDING_MS, Pseudonyms, anonymize, anonymous_meta
from tracefile.commandline.progress import counted
from tracefile.config import Config
from tracefile.files.digest import refuse_pipe
from tracefile.files.mooncake import LOST, mooncake_lines, usual_block_size
from tracefile.files.reading import TraceReader, check_continues, open_trace
from tracefile.files.writing import new_writer, write_lines
from tracefile.hashing.downsampling import downsample
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId
from tracefile.sessions import NO_CHAINS, SessionIndex


@dataclass(frozen=True, slots=True)
class Step:
    """Records after a step."""

    records: Callable[[], Iterator[Record]]
    """Reads them, each time from the first."""
    first_meta: Meta
    latest_meta: Callable[[], Meta]
    """The last header before the record read last: a trace may go on with another engine."""


class Inputs:
    """The input traces as one: merged by end, on the first one's clock."""

    def __init__(self, paths: Sequence[str]) -> None:
        if len(set(paths)) < len(paths):
            raise InputError(
                f"{next(path for path in paths if paths.count(path) > 1)}: given twice; expected each once"
            )
        self.paths = paths
        self.warnings: dict[str, None] = {}
        with contextlib.ExitStack() as opened:
            self._opened = {path: opened.enter_context(open_trace(path)) for path in paths}
            metas = [reader.meta for reader in self._opened.values()]
            zero_ns = metas[0].epoch_unix_ns
            for path, meta in zip(paths[1:], metas[1:], strict=True):
                _check_joins(metas[0], meta, path)
            self.close = opened.pop_all().close
        self.first_meta = self.latest_meta = metas[0]
        self.shifts_ms = [((meta.epoch_unix_ns or 0) - (zero_ns or 0)) / 1e6 for meta in metas]

    def read(self) -> Iterator[Record]:
        """Yield all records by end; ``warnings`` is complete after the last."""
        parts = list(map(self._read_one, self.paths, self.shifts_ms))
        used: Counter[RequestId] = Counter()
        for record in heapq.merge(*parts, key=lambda record: record.end_ms() or 0.0) if parts[1:] else parts[0]:
            if parts[1:]:
                used[record.request_id] += 1
                if (number := used[record.request_id]) > 1:
                    record.request_id = RequestId(f"{record.request_id}~{number}")
            yield record

    def _read_one(self, path: str, shift_ms: float) -> Iterator[Record]:
        if path not in self._opened:
            refuse_pipe(path)
        with self._opened.pop(path, None) or open_trace(path) as reader:
            for record in reader:
                self._note_meta(reader)
                for name in ("arrival_ms", "scheduled_ms") if shift_ms else ():
                    if (at_ms := getattr(record, name)) is not None:
                        setattr(record, name, round(at_ms + shift_ms, 6))
                yield record
            self._note_meta(reader)
            self.warnings |= dict.fromkeys(reader.warnings)

    def _note_meta(self, reader: TraceReader) -> None:
        if len(self.paths) == 1:
            self.latest_meta = reader.latest_meta


def _check_joins(first: Meta, meta: Meta, path: str) -> None:
    """Raise InputError unless the traces of two headers can become one."""
    if (meta.epoch_unix_ns is None) != (first.epoch_unix_ns is None):
        raise InputError(f"{path}: meta.epoch_unix_ns: {meta.epoch_unix_ns}; expected all wall clocks, or none")
    check_continues(first, msgspec.structs.replace(meta, epoch_unix_ns=first.epoch_unix_ns, source=first.source), path)


def convert_traces(config: Config) -> int:
    """Write the traces as one; raises InputError for what cannot be converted as the flags ask."""
    with contextlib.closing(Inputs(config.traces)) as inputs:
        return _convert(inputs, config)


def _convert(inputs: Inputs, config: Config) -> int:
    step = Step(lambda: counted(inputs.read(), "records read"), inputs.first_meta, lambda: inputs.latest_meta)
    if config.infer_sessions:
        step = with_sessions(step)
    if config.from_s or config.until_s is not None:
        step = in_time_range(step, config)
    block_size = config.block_size
    if block_size is None and config.to == "mooncake":
        block_size = usual_block_size(step.first_meta)
    if block_size is not None:
        step = in_blocks_of(step, block_size, config.traces[0])
    if config.anonymize:
        step = anonymized(step)
    count = _write(config, step) if config.to == "kvtape" else _export(config, step)
    for warning in inputs.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if config.anonymize:
        kept = f"lengths, shared prefixes, order, times to {ROUNDING_MS:g} ms, endpoints, the engine's settings"
        _say(config, f"still has {kept}")
    _say(config, f"{count:,} records" if config.to == "kvtape" else f"{count:,} requests as {config.to}")
    return 0


def with_sessions(step: Step) -> Step:
    """Infer the sessions of records without one, from the prefixes that they share."""

    def linked() -> Iterator[Record]:
        index, later_turns = SessionIndex(step.first_meta.block_size or 1), 0
        for record in step.records():
            record = index.link(record)  # noqa: PLW2901
            later_turns += (record.turn or 1) > 1
            yield record
        print(f"{later_turns:,} later turns of sessions" if later_turns else NO_CHAINS, file=sys.stderr)

    return Step(linked, step.first_meta, step.latest_meta)


def in_time_range(step: Step, config: Config) -> Step:
    """Keep the sessions that begin in a span of time, whole; reads the trace once for their beginnings."""
    begins_ms: dict[str, float] = {}
    for record in step.records():
        if record.arrival_ms is None:
            raise InputError(
                f"request {record.request_id}: arrival_ms: missing; expected a time for --from and --until"
            )
        name = session_name(record)
        begins_ms[name] = min(record.arrival_ms, begins_ms.get(name, math.inf))
    zero_ms = min(begins_ms.values(), default=0.0)
    from_ms = 1000 * config.from_s
    until_ms = math.inf if config.until_s is None else 1000 * config.until_s
    if not from_ms < until_ms:
        raise InputError(f"--until {until_ms / 1000:g}s: expected a time after --from {from_ms / 1000:g}s")
    kept = {name for name, begin_ms in begins_ms.items() if from_ms <= begin_ms - zero_ms < until_ms}
    if not kept:
        span_s = (max(begins_ms.values(), default=0.0) - zero_ms) / 1000
        raise InputError(f"no session begins in that span; expected one within {span_s:,.1f} s, the trace's")
    _say(config, f"{len(kept):,} of {len(begins_ms):,} sessions")
    return Step(
        lambda: (record for record in step.records() if session_name(record) in kept),
        step.first_meta,
        step.latest_meta,
    )


def session_name(record: Record) -> str:
    """Return the name of a record's session, never that of a request without one."""
    return f"request {record.request_id}" if record.session_id is None else f"session {record.session_id}"


def in_blocks_of(step: Step, block_size: int, path: str) -> Step:
    """Convert to coarser blocks."""
    fine = step.first_meta.block_size
    if fine is None or block_size < 1 or block_size % fine:
        raise InputError(
            f"{path}: --block-size {block_size}: expected a multiple of the trace's, {fine or 'which has none'}"
        )

    def resized(meta: Meta) -> Meta:
        known = None if meta.hash is None else msgspec.structs.replace(meta.hash, branches=None)
        return msgspec.structs.replace(meta, block_size=block_size, hash=known)

    return Step(
        lambda: (downsample(record, fine, block_size // fine) for record in step.records()),
        resized(step.first_meta),
        lambda: resized(step.latest_meta()),
    )


def anonymized(step: Step) -> Step:
    """Rename everything; reads the trace once for its first arrival and its blocks."""
    pseudonyms, zero_ms = Pseudonyms(), math.inf
    for record in step.records():
        pseudonyms.learn(record)
        zero_ms = zero_ms if record.arrival_ms is None else min(zero_ms, record.arrival_ms)
    zero_ms = 0.0 if math.isinf(zero_ms) else zero_ms
    meta = anonymous_meta(step.first_meta)
    return Step(lambda: anonymize(step.records(), pseudonyms, zero_ms), meta, lambda: meta)


def _write(config: Config, step: Step) -> int:
    """Write a kvtape trace, whole or not at all, with its later headers; return the number of records."""
    with new_writer(config.output, step.first_meta, inputs=config.traces, overwrite=config.overwrite) as writer:
        for record in step.records():
            writer.change_meta(step.latest_meta())
            writer.write(record)
        writer.change_meta(step.latest_meta())
    return writer.count


def _export(config: Config, step: Step) -> int:
    """Write Mooncake's lines, and print which facts they do not hold."""
    differences: Counter[str] = Counter()
    lines = list(mooncake_lines(step.records(), step.first_meta, config.traces[0], differences))
    write_lines(config.output, lines, inputs=config.traces, overwrite=config.overwrite)
    _say(config, LOST)
    for difference, number in (+differences).items():
        _say(config, f"{number:,} requests {difference}")
    return len(lines)


def _say(config: Config, message: str) -> None:
    print(f"{config.output}: {message}", file=sys.stderr)
