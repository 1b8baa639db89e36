"""A captured trace, read and checked for replay: what to send of it, and what cannot be sent.

It is read twice. The survey goes through all of it before anything is sent, holds no record, and raises what is wrong;
then each process of the run takes in its own sessions, in a few bytes for each block.
"""

import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from loadgen.core.job import WHOLE, Shard
from replay.partition import group_requests
from replay.selection import ALL, Selection
from replay.soundness import check_meta, check_record, find_cycle
from tracefile import (
    BlockHash,
    InputError,
    Meta,
    Record,
    RequestId,
    SessionId,
    TraceReader,
    infer_sessions,
    open_trace,
    trace_digest,
)
from tracefile.records.schema import HashSource, SessionSource
from wire.answer import GENERATING, LLAMA_CPP

HTTP_ERROR = 400
REPLAYABLE = GENERATING | {LLAMA_CPP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One request to send again."""

    request_id: RequestId
    session_id: SessionId | None
    session_source: SessionSource | None
    parent_id: RequestId | None
    turn: int | None
    offset_ms: float
    """From the first arrival of what is sent."""
    end_ms: float | None
    """When it ended, from there; null: unknown."""
    hashes: Sequence[BlockHash]
    """The chain as far as it is true; empty: nothing of it is known to be shared."""
    has_hashes: bool
    """Whether the trace knows the prompt's blocks."""
    hash_source: HashSource | None
    output_hashes: Sequence[BlockHash] | None
    prompt_tokens: int
    output_tokens: int
    """How many to generate, of all choices: for a request that was cut short, as many as had come."""
    cached_tokens: int | None
    endpoint: str | None
    stream: bool
    n: int | None
    priority: int | None
    lora: str | None

    def as_long(self, record: Record) -> bool:
        """Whether a replay's prompt and answer were as long as these."""
        return (record.prompt_tokens, record.output_tokens) == (self.prompt_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is known of a trace before any of it is sent."""

    path: str
    meta: Meta
    source_digest: str
    total: int
    """Records of the trace."""
    kept: int
    """Requests to be sent."""
    left_out: Counter[str]
    """Requests that are not sent, by reason."""
    cut: tuple[float, int] | None
    """Arrival and line of the last request that ``--limit`` lets through; null: no limit."""
    first_ms: float
    """The first arrival of what is sent, on the trace's clock."""
    last_ms: float
    """The last end or arrival of what is sent, on the trace's clock."""
    has_hashes: bool
    """Whether the trace knows anything of sharing."""
    links_known: bool
    """Whether the trace itself says who continued whom."""
    loras: frozenset[str]
    endpoints: frozenset[str]
    """Of what is sent."""
    beyond_limit: int
    """Requests whose answers were longer than their own limit."""

    @property
    def block_size(self) -> int:
        """Tokens in a hashed block; 1 where the trace has no hashes and no block to speak of."""
        return self.meta.block_size or 1

    @property
    def span_ms(self) -> float:
        """From the first arrival to the last end."""
        return self.last_ms - self.first_ms


def survey_trace(path: str | os.PathLike[str], selection: Selection = ALL) -> Survey:
    """Go through a trace once; raises InputError naming the line of a record that makes no sense."""
    with open_trace(path) as reader:
        check_meta(reader.meta, reader.path)
        seen = _Seen(reader.meta.block_size)
        for record in reader:
            seen.add(record, reader, selection)
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        seen.check_parents(reader)
        return seen.survey(reader, selection, trace_digest(path))


class _Seen:
    """A survey as it grows: ids, lines and arrivals of all, records of none."""

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size
        self._lines: dict[RequestId, int] = {}
        self._parents: dict[RequestId, RequestId] = {}
        self._arrivals_ms = array("d")
        self._ends_ms = array("d")
        self._at = array("q")
        self.left_out: Counter[str] = Counter()
        self._hashed = False
        self._linked = False
        self._loras: set[str] = set()
        self._endpoints: set[str] = set()
        self._beyond_limit = 0

    def add(self, record: Record, reader: TraceReader, selection: Selection) -> None:
        """One record, checked; raises InputError."""
        where = reader.where()
        if record.request_id in self._lines:
            before = reader.where(self._lines[record.request_id])
            raise InputError(f"{where}: request_id: as on line {before.rpartition(':')[2]}; expected unique ids")
        self._lines[record.request_id] = reader.line
        check_record(record, self._block_size, where)
        if record.parent_id is not None:
            self._parents[record.request_id] = record.parent_id
        reason = why_not(record, self._block_size) or selection.why_not(record)
        if reason is not None:
            self.left_out[reason] += 1
            return
        self._arrivals_ms.append(record.arrival_ms or 0.0)
        self._ends_ms.append((record.arrival_ms or 0.0) + (record.e2e_ms or 0.0))
        self._at.append(reader.line)
        self._hashed = self._hashed or record.block_hashes is not None
        self._linked = self._linked or record.parent_id is not None
        if record.lora is not None:
            self._loras.add(record.lora)
        if record.endpoint is not None:
            self._endpoints.add(record.endpoint)
        if record.max_tokens is not None and (record.output_tokens or 0) > record.max_tokens * (record.n or 1):
            self._beyond_limit += 1

    def check_parents(self, reader: TraceReader) -> None:
        """Raise InputError for a chain of parents that comes back to itself; warn of parents that are not there."""
        in_cycle = find_cycle(self._parents)
        if in_cycle is not None:
            where = reader.where(self._lines[in_cycle])
            raise InputError(f"{where}: parent_id: a cycle; expected parents to come first")
        unknown = [child for child, parent in self._parents.items() if parent not in self._lines]
        if unknown:
            print(
                f"warning: {reader.where(self._lines[unknown[0]])}: parent_id: not in the trace, as of {len(unknown)} "
                "requests; each is sent as a session's first",
                file=sys.stderr,
            )

    def survey(self, reader: TraceReader, selection: Selection, source_digest: str) -> Survey:
        """What was seen, cut to ``--limit``; raises InputError if nothing is left to send."""
        order = sorted(range(len(self._at)), key=lambda index: (self._arrivals_ms[index], self._at[index]))
        beyond = order[selection.limit :] if selection.limit is not None else []
        if beyond:
            self.left_out["beyond --limit"] = len(beyond)
            del order[selection.limit :]
        if not order:
            raise InputError(
                f"{reader.path}: no request that can be sent; {dict(self.left_out) or 'it has no records'}"
            )
        return Survey(
            path=reader.path,
            meta=reader.meta,
            source_digest=source_digest,
            total=len(self._lines),
            kept=len(order),
            left_out=self.left_out,
            cut=(self._arrivals_ms[order[-1]], self._at[order[-1]]) if beyond else None,
            first_ms=self._arrivals_ms[order[0]],
            last_ms=max(self._ends_ms[index] for index in order),
            has_hashes=self._hashed,
            links_known=self._linked,
            loras=frozenset(self._loras),
            endpoints=frozenset(self._endpoints),
            beyond_limit=self._beyond_limit,
        )


def load_requests(
    survey: Survey, selection: Selection = ALL, *, shard: Shard = WHOLE, sessions: bool = False, splice: bool = True
) -> list[Captured]:
    """The requests that are a shard's to send, in order of arrival.

    ``sessions`` infers who continued whom where the trace does not say. ``splice``: generated blocks bind requests.
    """
    read = partial(read_kept, survey, selection)
    if sessions and survey.meta.block_size is not None and not survey.links_known:
        linked = infer_sessions(read(), survey.block_size).records
        read = partial(iter, linked)
    has = _membership(read, shard, splice=splice)
    own = [captured_of(record, survey.first_ms, survey.block_size) for record in read() if has(record)]
    own.sort(key=lambda request: request.offset_ms)
    return own


def read_kept(survey: Survey, selection: Selection) -> Iterator[Record]:
    """The records that are to be sent, in file order."""
    with open_trace(survey.path) as reader:
        for record in reader:
            if why_not(record, survey.meta.block_size) or selection.why_not(record):
                continue
            if survey.cut is None or (record.arrival_ms or 0.0, reader.line) <= survey.cut:
                yield record


def _membership(read: Callable[[], Iterator[Record]], shard: Shard, *, splice: bool) -> Callable[[Record], bool]:
    if shard.count == 1:
        return lambda record: True
    groups = group_requests(read, splice=splice)
    return lambda record: shard.has(groups[record.request_id])


def why_not(record: Record, block_size: int | None) -> str | None:
    """Why a request cannot be sent again; null: it can.

    What the engine refused (HTTP 4xx, 5xx) or never saw took none of its time, so it is left out; what was cut short
    after the engine had it is sent with as many output tokens as had come.
    """
    if record.endpoint is not None and record.endpoint not in REPLAYABLE:
        return "no generation: embeddings, scores, audio"
    if record.status == "error" and record.ttft_ms is None and not record.output_tokens:
        refused = record.http_status is not None and record.http_status >= HTTP_ERROR
        return "refused in the capture" if refused else "never reached the engine in the capture"
    if record.arrival_ms is None:
        return "no arrival time"
    if record.prompt_tokens is None and not (record.block_hashes and block_size):
        return "no prompt length"
    return None


def output_to_generate(record: Record) -> int:
    """How many tokens to generate: as recorded, else as many as were seen to come; at least one."""
    if record.output_tokens:
        return record.output_tokens
    if record.status == "ok" and record.output_tokens is None and record.max_tokens:
        return record.max_tokens
    return max(1, sum(record.itl_tokens) + (record.ttft_ms is not None))


def captured_of(record: Record, first_ms: float, block_size: int) -> Captured:
    """A record as a request to send again; hashes in eight bytes each, for a trace has millions."""
    hashes = array("Q", record.block_hashes or [])
    if record.hashable_blocks is not None:
        del hashes[record.hashable_blocks :]
    output = record.output_block_hashes
    end_ms = record.end_ms()
    return Captured(
        request_id=record.request_id,
        session_id=record.session_id,
        session_source=record.session_source,
        parent_id=record.parent_id,
        turn=record.turn,
        offset_ms=(record.arrival_ms or 0.0) - first_ms,
        end_ms=None if end_ms is None else end_ms - first_ms,
        hashes=block_hashes(hashes),
        has_hashes=record.block_hashes is not None,
        hash_source=record.hash_source,
        output_hashes=None if output is None else block_hashes(array("Q", output)),
        prompt_tokens=len(hashes) * block_size if record.prompt_tokens is None else record.prompt_tokens,
        output_tokens=output_to_generate(record),
        cached_tokens=record.cached_tokens,
        endpoint=record.endpoint,
        stream=record.stream is not False,
        n=record.n,
        priority=record.priority,
        lora=record.lora,
    )


def block_hashes(values: "array[int]") -> Sequence[BlockHash]:
    """An array of hashes, by its true name."""
    return values  # type: ignore[return-value]  # BlockHash is an int
