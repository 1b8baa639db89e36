"""Requests of a captured trace, read by each shard after the survey: its own sessions, a few bytes for each block."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from loadgen.core.job import WHOLE, Shard
from replay.survey import ALL, Selection, Survey, why_not
from tracefile.files.reading import open_trace
from tracefile.hashing.branches import Branch, record_branch, tail_key
from tracefile.hashing.tokenchains import Branches, branches_of
from tracefile.outputs import infer_outputs
from tracefile.records.schema import BlockHash, HashSource, Record, RequestId, SessionId, SessionSource
from tracefile.sessions import infer_sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Request to send again."""

    request_id: RequestId
    session_id: SessionId | None
    session_source: SessionSource | None
    parent_id: RequestId | None
    turn: int | None
    offset_ms: float
    end_ms: float | None
    hashes: Sequence[BlockHash]
    """Block hashes, as far as they are valid; empty: no known sharing."""
    has_hashes: bool
    hash_source: HashSource | None
    output_hashes: Sequence[BlockHash] | None
    unfilled: BlockHash | None = None
    """Name of the block that the prompt leaves unfilled (``tracefile.hashing.branches``). Null: no true one."""
    branch: Branch | None = None
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate, of all choices; of a request cut short, the tokens seen."""
    cached_tokens: int | None
    endpoint: str | None
    stream: bool
    n: int | None
    priority: int | None
    prompt_logprobs: bool = False
    lora: str | None

    @property
    def tail(self) -> BlockHash:
        """Name of the block that prompt and output leave unfilled."""
        return tail_key(self.output_hashes or self.hashes, self.request_id)

    def as_long(self, record: Record) -> bool:
        """True if a replayed prompt and output have the captured lengths."""
        return (record.prompt_tokens, record.output_tokens) == (self.prompt_tokens, self.output_tokens)


def load_capture(
    survey: Survey,
    selection: Selection = ALL,
    *,
    shard: Shard = WHOLE,
    sessions: bool = False,
    output_substitution: bool = True,
) -> tuple[list[Captured], Branches | None]:
    """Requests of one shard in order of arrival, and the branches of the trace.

    ``output_substitution``: sharers of output blocks stay together. Null branches: the trace names only the block where
    chains diverge.
    """
    read: Callable[[], Iterator[Record]] = partial(read_kept, survey, selection)
    if sessions and survey.meta.block_size is not None and not survey.links_known:
        linked = infer_sessions(read(), survey.block_size).records
        read = partial(iter, linked)
    has_branches = bool(survey.meta.hash and survey.meta.hash.branches)
    branches = None
    if output_substitution or has_branches:
        inferred, recorded = infer_outputs(survey.meta, read()), read
        if output_substitution:
            read = lambda: map(inferred.fill, recorded())  # noqa: E731
        if has_branches:
            with open_trace(survey.path) as reader:
                branches = branches_of(map(inferred.fill, reader), survey.block_size)
    has = _membership(read, shard, survey.block_size, output_substitution=output_substitution)
    mine = [captured_of(record, survey.first_ms, survey.block_size) for record in read() if has(record)]
    mine.sort(key=lambda request: request.offset_ms)
    return mine, branches


def read_kept(survey: Survey, selection: Selection) -> Iterator[Record]:
    with open_trace(survey.path) as reader:
        for record in reader:
            if not why_not(record, survey.meta.block_size) and not selection.why_not(record):
                yield record


def _membership(
    read: Callable[[], Iterator[Record]], shard: Shard, block_size: int, *, output_substitution: bool
) -> Callable[[Record], bool]:
    if shard.count == 1:
        return lambda record: True
    groups = group_requests(read, block_size, output_substitution=output_substitution)
    return lambda record: shard.has(groups[record.request_id])


def output_to_generate(record: Record) -> int:
    """Recorded output tokens, else the number of seen ones; at least 1."""
    if record.output_tokens:
        return record.output_tokens
    if record.status == "ok" and record.output_tokens is None and record.max_tokens:
        return record.max_tokens
    return max(1, sum(record.itl_tokens) + (record.ttft_ms is not None))


def captured_of(record: Record, first_ms: float, block_size: int) -> Captured:
    """Hashes take eight bytes each, because a trace has millions."""
    hashes = array("Q", record.block_hashes or [])
    if record.hashable_blocks is not None:
        del hashes[record.hashable_blocks :]
    output = record.output_block_hashes
    end_ms = record.end_ms()
    whole = len(hashes) == (record.prompt_tokens or 0) // block_size
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
        unfilled=unfilled_block(record) if whole and record.block_hashes is not None else None,
        branch=branch_of(record),
        prompt_tokens=len(hashes) * block_size if record.prompt_tokens is None else record.prompt_tokens,
        output_tokens=output_to_generate(record),
        cached_tokens=record.cached_tokens,
        endpoint=record.endpoint,
        stream=record.stream is not False,
        n=record.n,
        priority=record.priority,
        prompt_logprobs=bool(record.prompt_logprobs),
        lora=record.lora,
    )


def unfilled_block(record: Record) -> BlockHash:
    """Return the name of the block that the prompt leaves unfilled: the output fills it, or it is the last."""
    output = record.output_block_hashes
    return output[0] if output else tail_key(record.block_hashes or (), record.request_id)


def branch_of(record: Record) -> Branch | None:
    if record.branch_tokens is None or record.branch_hash is None:
        return None
    return Branch(record.branch_tokens, record.branch_hash)


def block_hashes(values: "array[int]") -> Sequence[BlockHash]:
    return values  # type: ignore[return-value]  # BlockHash is an int


class Groups:
    """Disjoint sets that grow together, by number."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def add(self) -> int:
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def find(self, item: int) -> int:
        while self._parents[item] != item:
            self._parents[item] = self._parents[self._parents[item]]
            item = self._parents[item]
        return item

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self._parents[high] = low


def group_requests(
    read: Callable[[], Iterable[Record]], block_size: int, *, output_substitution: bool
) -> Mapping[RequestId, int]:
    """Number every request's group from 0, by first records. ``read`` iterates the records, once or twice."""
    groups = Groups()
    items: dict[RequestId, int] = {}
    names: dict[str, int] = {}
    makers: dict[BlockHash, int] = {}
    parts: dict[BlockHash, int] = {}
    for record in read():
        item = items[record.request_id] = groups.add()
        for name in _names(record):
            groups.join(names.setdefault(name, item), item)
        for block in _generated(record) if output_substitution else ():
            groups.join(makers.setdefault(block, item), item)
            parts.setdefault(block, 0)
        if output_substitution and record.output_block_hashes is not None:
            parts[unfilled_block(record)] = (record.prompt_tokens or 0) % block_size
    if makers:
        for record in read():
            carried = list(record.block_hashes or ())
            branch = record_branch(record, block_size)
            if branch is not None and branch.tokens > parts.get(branch.earlier, 0):
                carried.append(branch.earlier)  # it goes on with a part of an output
            _bind_carrier(groups, items[record.request_id], carried, makers)
    numbers: dict[int, int] = {}
    return {request_id: numbers.setdefault(groups.find(item), len(numbers)) for request_id, item in items.items()}


def _generated(record: Record) -> list[BlockHash]:
    """Blocks with output tokens, the unfilled last one included where its name can occur."""
    if record.output_block_hashes is None:
        return []
    return [*record.output_block_hashes, tail_key(record.chain(), record.request_id)]


def _names(record: Record) -> list[str]:
    """Names that bind a request to others: itself (for its children), its parent, its session."""
    names = [f"request {record.request_id}"]
    if record.parent_id is not None:
        names.append(f"request {record.parent_id}")
    if record.session_id is not None:
        names.append(f"session {record.session_id}")
    return names


def _bind_carrier(groups: Groups, item: int, carried: Iterable[BlockHash], makers: Mapping[BlockHash, int]) -> None:
    """Join a request with the generators of its prompt's blocks."""
    for block in carried:
        maker = makers.get(block)
        if maker is not None:
            groups.join(maker, item)
