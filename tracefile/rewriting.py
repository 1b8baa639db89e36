"""Commands that write a trace from traces: convert, cut, anonymize, join, synthesize."""

import contextlib
import heapq
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tracefile.commandline.durations import Moment
from tracefile.commandline.progress import counted
from tracefile.config import Config
from tracefile.exporters.formats import TARGETS, Export, export_lines, usual_block_size
from tracefile.exporters.loss import Loss
from tracefile.files.digest import trace_digest
from tracefile.files.reading import check_continues, open_trace
from tracefile.files.writing import new_writer, write_lines
from tracefile.hashing.tokenchains import Resizing, branches_of, is_finer
from tracefile.records.errors import InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import Meta, Record, RequestId
from tracefile.sessions import NO_CHAINS, SessionIndex
from tracefile.storage.segments import listed_arrivals
from tracefile.study.anonymity import Pseudonyms, anonymize, anonymous_meta
from tracefile.study.averaging import SessionMeans, mean_meta, mean_records
from tracefile.study.cutting import Part, Sessions, cut
from tracefile.study.synthesis import Scale, Source, synthesize, synthetic_meta


def convert_trace(config: Config, reader: TraceReader) -> int:
    """Copy record by record, in another block size or format if asked; constant memory, but for the session index's."""
    index = SessionIndex(reader.meta.block_size or 1) if config.sessions else None
    block_size = config.block_size or usual_block_size(config.to, reader.meta)
    resizing = None if block_size is None else resizing_of(block_size, reader)
    meta_of = (lambda meta: meta) if resizing is None else resizing.meta
    later_turns = 0

    def converted() -> Iterator[Record]:
        nonlocal later_turns
        for record in counted(reader, "records converted"):
            linked = index.link(record) if index else record
            later_turns += (linked.turn or 1) > 1
            yield linked if resizing is None else resizing.record(linked)

    if config.to == "kvtape":
        _write(config, meta_of(reader.meta), converted(), latest_meta=lambda: meta_of(reader.latest_meta))
    else:
        _export(config, meta_of(reader.meta), converted())
    if index:
        told = f"{later_turns:,} later turns of sessions" if later_turns else NO_CHAINS
        _say(config, told)
    return 0


def resizing_of(block_size: int, reader: TraceReader) -> Resizing:
    """Return the conversion to another block size; a finer one reads the trace's branches first."""
    if block_size < 1:
        raise InputError(f"--block-size: {block_size}; expected 1 or more")
    branches = None
    if is_finer(block_size, reader.meta, reader.path):
        with open_trace(reader.path) as whole:
            branches = branches_of(whole, reader.meta.block_size or 1)
    return Resizing(reader.meta, block_size, branches)


def _export(config: Config, meta: Meta, records: Iterable[Record]) -> None:
    """Write another format, and say which facts it does not hold."""
    assert config.output is not None
    loss = Loss()
    lines = export_lines(config.to, Export(meta, records, config.trace, loss))
    write_lines(config.output, lines, inputs=[config.trace], overwrite=config.overwrite)
    _say(config, f"{loss.kept:,} requests as {config.to}; lost: {TARGETS[config.to].lost}")
    for sentence in loss.lines():
        _say(config, sentence)


def cut_trace(config: Config, reader: TraceReader) -> int:
    """Read the trace once for its sessions, and once more to copy the part's.

    Sessions that begin in a span of time have no record before it, so segments that end before it are not copied. Nor
    are later segments looked at for beginnings.
    """
    sessions, segments = Sessions(), listed_arrivals(config.trace)
    if config.to_s is None or isinstance(config.to_s, Moment) == isinstance(config.from_s, Moment):
        _part(
            config, reader.meta, 0.0
        )  # refuses before the trace is read; a date and a duration need its first arrival
    zero_ms = min((one.first_arrival_ms or 0.0 for one in segments.values()), default=0.0)
    to_ms = _part(config, reader.meta, zero_ms).to_ms if segments else math.inf

    def begins_before_end(file: str) -> bool:
        return file not in segments or (segments[file].first_arrival_ms or 0.0) - zero_ms < to_ms

    with open_trace(config.trace, begins_before_end) as first:
        for record in counted(first, "records read"):
            sessions.add(record)
    zero_ms = min(sessions.begins_ms.values(), default=0.0)
    part = _part(config, reader.meta, zero_ms)
    taken = sessions.taken(part)

    def ends_after_begin(file: str) -> bool:
        return file not in segments or (segments[file].last_arrival_ms or 0.0) - zero_ms >= part.from_ms

    with open_trace(config.trace, ends_after_begin) as again:
        _write(config, reader.meta, cut(counted(again, "records read again"), taken), lambda: again.latest_meta)
        for warning in again.warnings:
            if warning not in reader.warnings:  # which the caller tells
                print(f"warning: {warning}", file=sys.stderr)
    _say(config, f"{len(taken):,} of {len(sessions.begins_ms):,} sessions")
    return 0


def _part(config: Config, meta: Meta, zero_ms: float) -> Part:
    """Return the part that flags name; ``zero_ms``: the first arrival, from which moments are counted."""

    def after_first_ms(time_s: float) -> float:
        if not isinstance(time_s, Moment):
            return time_s * 1000
        if meta.epoch_unix_ns is None:
            raise InputError(f"{config.trace}: meta.epoch_unix_ns: missing; expected durations in --from and --to")
        return time_s * 1000 - meta.epoch_unix_ns / 1e6 - zero_ms

    to_ms = math.inf if config.to_s is None else after_first_ms(config.to_s)
    return Part(from_ms=after_first_ms(config.from_s), to_ms=to_ms, sessions=config.most_sessions)


def anonymize_trace(config: Config, reader: TraceReader) -> int:
    """Read the trace once for its first arrival and its blocks, and once more to write it under new names."""
    pseudonyms = Pseudonyms()
    zero_ms = math.inf
    with open_trace(config.trace) as first:
        for record in counted(first, "records read"):
            pseudonyms.learn(record)
            zero_ms = zero_ms if record.arrival_ms is None else min(zero_ms, record.arrival_ms)
    zero_ms = 0.0 if math.isinf(zero_ms) else zero_ms
    records = anonymize(counted(reader, "records written"), pseudonyms, zero_ms, config.round_s * 1000)
    _write(config, anonymous_meta(reader.meta), records)
    told = f"lengths, shared prefixes, order, times to {config.round_s * 1000:g} ms, endpoints, the engine's settings"
    _say(config, f"still told: {told}")
    return 0


def synthesize_trace(config: Config, reader: TraceReader) -> int:
    """Scale the trace; only it and the conversations that have turns to come are in memory."""
    digest = trace_digest(config.trace)
    if config.mean_session:
        if config.spread != 1.0:
            raise InputError("--spread: without --scale; expected both: mean sessions are as many as the trace's")
        return _write_mean_sessions(config, reader, digest)
    assert config.scale is not None
    scale = Scale(times=config.scale, spread=config.spread, seed=config.seed)
    source = Source(counted(reader, "records read"), config.trace)
    _write(config, synthetic_meta(reader.meta, digest, scale), counted(synthesize(source, scale), "records made"))
    return 0


def _write_mean_sessions(config: Config, reader: TraceReader, digest: str) -> int:
    means = SessionMeans()
    for record in counted(reader, "records read"):
        means.add(record)
    mean, header = means.mean(), mean_meta(reader.meta, digest)
    assert header.block_size is not None
    starts_ms = [session[0].arrival_ms for session in means.ordered()]
    _write(config, header, mean_records(mean, starts_ms, header.block_size))
    _say(
        config,
        f"{len(starts_ms):,} sessions of {mean.turns} turns: prompt {mean.input_prompt:,} tokens, "
        f"response {mean.response:,}, then {mean.new_tokens:,} new after {mean.think_ms / 1000:.3g} s, "
        f"final response {mean.final_response:,}",
    )
    return 0


def join_traces(config: Config) -> int:
    """Copy the records of one trace after another, or merge them on one clock."""
    for place, trace in enumerate(config.traces):
        if os.path.realpath(trace) in map(os.path.realpath, config.traces[:place]):
            raise InputError(f"{trace}: given twice; expected each trace once")
    metas = [_first_meta(trace) for trace in config.traces]
    if config.align:
        return _align(config, metas)
    for trace, meta in zip(config.traces, metas, strict=True):
        if meta.epoch_unix_ns != metas[0].epoch_unix_ns:
            raise InputError(
                f"{trace}: recorded on another clock than {config.traces[0]}; expected --align, which shifts its times "
                "to the first trace's"
            )
        check_continues(metas[0], meta, trace)
    assert config.output is not None
    with new_writer(config.output, metas[0], inputs=config.traces, overwrite=config.overwrite) as writer:
        for trace in config.traces:
            with open_trace(trace) as reader:
                for record in counted(reader, "records joined"):
                    writer.change_meta(reader.latest_meta)
                    writer.write(record)
                writer.change_meta(reader.latest_meta)
                warn(reader)
    _say(config, f"{writer.count} records")
    return 0


def _align(config: Config, metas: Sequence[Meta]) -> int:
    """Merge traces whose clocks differ: times become the first trace's, request ids stay unique."""
    zero_ns = metas[0].epoch_unix_ns
    used: Counter[RequestId] = Counter()
    with contextlib.ExitStack() as opened:
        shifted = []
        for trace, meta in zip(config.traces, metas, strict=True):
            if meta.epoch_unix_ns is None or zero_ns is None:
                raise InputError(f"{trace}: meta.epoch_unix_ns: missing; expected a wall clock to align by")
            check_continues(
                metas[0], msgspec.structs.replace(meta, epoch_unix_ns=zero_ns, source=metas[0].source), trace
            )
            reader = opened.enter_context(open_trace(trace))
            shifted.append(_shifted(reader, (meta.epoch_unix_ns - zero_ns) / 1e6))
        merged = heapq.merge(*shifted, key=lambda record: record.end_ms() or record.arrival_ms or 0.0)
        _write(config, metas[0], _unique(counted(merged, "records joined"), used), inputs=config.traces)
    return 0


def _shifted(reader: TraceReader, shift_ms: float) -> Iterator[Record]:
    for record in reader:
        if record.arrival_ms is not None:
            record.arrival_ms = round(record.arrival_ms + shift_ms, 6)
        if record.scheduled_ms is not None:
            record.scheduled_ms = round(record.scheduled_ms + shift_ms, 6)
        yield record
    warn(reader)


def _unique(records: Iterator[Record], used: Counter[RequestId]) -> Iterator[Record]:
    """Records whose ids are not used before: a second one of a name gets its number."""
    for record in records:
        used[record.request_id] += 1
        if (number := used[record.request_id]) > 1:
            record.request_id = RequestId(f"{record.request_id}~{number}")
        yield record


def _write(
    config: Config,
    meta: Meta,
    records: Iterator[Record],
    latest_meta: Callable[[], Meta] | None = None,
    inputs: Sequence[str] = (),
) -> None:
    """Write the output whole; with ``latest_meta``, also the headers that it returns before a record and at the end."""
    assert config.output is not None
    with new_writer(config.output, meta, inputs=inputs or [config.trace], overwrite=config.overwrite) as writer:
        for record in records:
            if latest_meta is not None:
                writer.change_meta(latest_meta())
            writer.write(record)
        if latest_meta is not None:
            writer.change_meta(latest_meta())
    _say(config, f"{writer.count} records")


def _first_meta(trace: str) -> Meta:
    with open_trace(trace) as reader:
        return reader.meta


def _say(config: Config, told: str) -> None:
    print(f"{config.output}: {told}", file=sys.stderr)


def warn(reader: TraceReader) -> None:
    """Print what was skipped, dropped or assumed."""
    for warning in reader.warnings:
        print(f"warning: {warning}", file=sys.stderr)
