"""``tracefile convert``: a pipeline from one or several traces to one trace.

The steps, in order: join, sessions, time range, block size, anonymize, write. A step may iterate over its input records
more than once, and so may the next step. A step that iterates once needs constant memory.
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
    """Output of a step of the pipeline."""

    records: Callable[[], Iterator[Record]]
    """Iterates over the records from the first, at each call."""
    first_meta: Meta
    latest_meta: Callable[[], Meta]
    """Returns the header of the latest record: the engine may change within a trace."""


class Inputs:
    """Input traces merged by request end time, on the clock of the first trace."""

    def __init__(self, paths: Sequence[str]) -> None:
        if len(set(paths)) < len(paths):
            raise InputError(
                f"{next(path for path in paths if paths.count(path) > 1)}: given twice; expected each trace once"
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
        """Yield all records by end time; ``warnings`` is complete after the last."""
        parts = list(map(self._read_trace, self.paths, self.shifts_ms))
        uses: Counter[RequestId] = Counter()
        for record in heapq.merge(*parts, key=lambda record: record.end_ms() or 0.0) if parts[1:] else parts[0]:
            if parts[1:]:
                uses[record.request_id] += 1
                if (number := uses[record.request_id]) > 1:
                    record.request_id = RequestId(f"{record.request_id}~{number}")
            yield record

    def _read_trace(self, path: str, shift_ms: float) -> Iterator[Record]:
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
    """Raise InputError unless the traces of two headers can be joined."""
    if (meta.epoch_unix_ns is None) != (first.epoch_unix_ns is None):
        raise InputError(f"{path}: meta.epoch_unix_ns: {meta.epoch_unix_ns}; expected all wall clocks, or none")
    check_continues(first, msgspec.structs.replace(meta, epoch_unix_ns=first.epoch_unix_ns, source=first.source), path)


def convert_traces(config: Config) -> int:
    """Convert the input traces to one trace; raises InputError if the flags do not fit the traces."""
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
        preserved = f"lengths, shared prefixes, order, times to {ROUNDING_MS:g} ms, endpoints, engine settings"
        _report(config, f"still contains {preserved}")
    _report(config, f"{count:,} records" if config.to == "kvtape" else f"{count:,} requests as {config.to}")
    return 0


def with_sessions(step: Step) -> Step:
    """Infer the sessions of records without a session id from shared prefixes."""

    def linked() -> Iterator[Record]:
        index, later_turns = SessionIndex(step.first_meta.block_size or 1), 0
        for record in step.records():
            record = index.link(record)  # noqa: PLW2901
            later_turns += (record.turn or 1) > 1
            yield record
        print(f"{later_turns:,} later turns of sessions" if later_turns else NO_CHAINS, file=sys.stderr)

    return Step(linked, step.first_meta, step.latest_meta)


def in_time_range(step: Step, config: Config) -> Step:
    """Keep complete sessions that begin in a time range; reads the trace once more for the session starts."""
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
    selected = {name for name, begin_ms in begins_ms.items() if from_ms <= begin_ms - zero_ms < until_ms}
    if not selected:
        span_s = (max(begins_ms.values(), default=0.0) - zero_ms) / 1000
        raise InputError(f"no session begins in that time range; expected a range within the trace's {span_s:,.1f} s")
    _report(config, f"{len(selected):,} of {len(begins_ms):,} sessions")
    return Step(
        lambda: (record for record in step.records() if session_name(record) in selected),
        step.first_meta,
        step.latest_meta,
    )


def session_name(record: Record) -> str:
    """Return a key for the record's session; a request without a session has a key of its own."""
    return f"request {record.request_id}" if record.session_id is None else f"session {record.session_id}"


def in_blocks_of(step: Step, block_size: int, path: str) -> Step:
    """Convert block hashes to a larger block size."""
    fine = step.first_meta.block_size
    if fine is None or block_size < 1 or block_size % fine:
        raise InputError(
            f"{path}: --block-size {block_size}: expected a multiple of the trace's block size ({fine or 'unknown'})"
        )

    def resized(meta: Meta) -> Meta:
        hash_info = None if meta.hash is None else msgspec.structs.replace(meta.hash, branches=None)
        return msgspec.structs.replace(meta, block_size=block_size, hash=hash_info)

    return Step(
        lambda: (downsample(record, fine, block_size // fine) for record in step.records()),
        resized(step.first_meta),
        lambda: resized(step.latest_meta()),
    )


def anonymized(step: Step) -> Step:
    """Anonymize the records; reads the trace once more for its first arrival and its blocks."""
    pseudonyms, zero_ms = Pseudonyms(), math.inf
    for record in step.records():
        pseudonyms.learn(record)
        zero_ms = zero_ms if record.arrival_ms is None else min(zero_ms, record.arrival_ms)
    zero_ms = 0.0 if math.isinf(zero_ms) else zero_ms
    meta = anonymous_meta(step.first_meta)
    return Step(lambda: anonymize(step.records(), pseudonyms, zero_ms), meta, lambda: meta)


def _write(config: Config, step: Step) -> int:
    """Write a kvtape trace atomically, with its later headers; return the number of records."""
    with new_writer(config.output, step.first_meta, inputs=config.traces, overwrite=config.overwrite) as writer:
        for record in step.records():
            writer.change_meta(step.latest_meta())
            writer.write(record)
        writer.change_meta(step.latest_meta())
    return writer.count


def _export(config: Config, step: Step) -> int:
    """Write a Mooncake trace, and print the fields that the format cannot hold."""
    differences: Counter[str] = Counter()
    lines = list(mooncake_lines(step.records(), step.first_meta, config.traces[0], differences))
    write_lines(config.output, lines, inputs=config.traces, overwrite=config.overwrite)
    _report(config, LOST)
    for difference, number in (+differences).items():
        _report(config, f"{number:,} requests {difference}")
    return len(lines)


def _report(config: Config, message: str) -> None:
    print(f"{config.output}: {message}", file=sys.stderr)
