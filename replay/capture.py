"""Requests of a captured trace, read by each shard after the survey: the shard's sessions, 8 bytes a block hash."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from loadgen.core.job import UNSHARDED, Shard
from replay.survey import ALL, Selection, Survey, skip_reason
from tracefile.files.reading import open_trace
from tracefile.hashing.branches import Branch, record_branch, tail_key
from tracefile.hashing.tokenchains import Branches, branches_of
from tracefile.outputs import infer_outputs
from tracefile.records.schema import BlockHash, HashSource, Record, RequestId, SessionId, SessionSource
from tracefile.sessions import infer_sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Captured request to replay."""

    request_id: RequestId
    session_id: SessionId | None
    session_source: SessionSource | None
    parent_id: RequestId | None
    turn: int | None
    offset_ms: float
    end_ms: float | None
    hashes: Sequence[BlockHash]
    """Valid block hashes; empty: no known prefix sharing."""
    has_hashes: bool
    hash_source: HashSource | None
    output_hashes: Sequence[BlockHash] | None
    unfilled: BlockHash | None = None
    """Name of the prompt's last, partly filled block (``tracefile.hashing.branches``). Null: no valid name."""
    branch: Branch | None = None
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate, over all choices; of an interrupted request, the tokens received."""
    cached_tokens: int | None
    endpoint: str | None
    stream: bool
    n: int | None
    priority: int | None
    prompt_logprobs: bool = False
    lora: str | None

    @property
    def tail(self) -> BlockHash:
        """Name of the block that prompt and output fill only partly."""
        return tail_key(self.output_hashes or self.hashes, self.request_id)

    def as_long(self, record: Record) -> bool:
        """True if the replayed prompt and output have the captured token counts."""
        return (record.prompt_tokens, record.output_tokens) == (self.prompt_tokens, self.output_tokens)


def load_capture(
    survey: Survey,
    selection: Selection = ALL,
    *,
    shard: Shard = UNSHARDED,
    sessions: bool = False,
    output_substitution: bool = True,
) -> tuple[list[Captured], Branches | None]:
    """Return one shard's requests in order of arrival, and the branches of the trace.

    ``output_substitution``: requests that share output blocks stay in one shard. Null branches: the trace names only
    the block where hash chains diverge.
    """
    read: Callable[[], Iterator[Record]] = partial(read_selected, survey, selection)
    if sessions and survey.meta.block_size is not None and not survey.has_parent_ids:
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
    requests = [captured_of(record, survey.first_ms, survey.block_size) for record in read() if has(record)]
    requests.sort(key=lambda request: request.offset_ms)
    return requests, branches


def read_selected(survey: Survey, selection: Selection) -> Iterator[Record]:
    with open_trace(survey.path) as reader:
        for record in reader:
            if not skip_reason(record, survey.meta.block_size) and not selection.skip_reason(record):
                yield record


def _membership(
    read: Callable[[], Iterator[Record]], shard: Shard, block_size: int, *, output_substitution: bool
) -> Callable[[Record], bool]:
    if shard.count == 1:
        return lambda record: True
    groups = group_requests(read, block_size, output_substitution=output_substitution)
    return lambda record: shard.has(groups[record.request_id])


def output_to_generate(record: Record) -> int:
    """Recorded output tokens, else the number of tokens received; at least 1."""
    if record.output_tokens:
        return record.output_tokens
    if record.status == "ok" and record.output_tokens is None and record.max_tokens:
        return record.max_tokens
    return max(1, sum(record.itl_tokens) + (record.ttft_ms is not None))


def captured_of(record: Record, first_ms: float, block_size: int) -> Captured:
    """Convert a record. Block hashes are packed into 8 bytes each, because a trace has millions."""
    hashes = array("Q", record.block_hashes or [])
    if record.hashable_blocks is not None:
        del hashes[record.hashable_blocks :]
    output = record.output_block_hashes
    end_ms = record.end_ms()
    complete = len(hashes) == (record.prompt_tokens or 0) // block_size
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
        unfilled=unfilled_block(record) if complete and record.block_hashes is not None else None,
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
    """Return the name of the prompt's last, partly filled block: an output block, or the tail."""
    output = record.output_block_hashes
    return output[0] if output else tail_key(record.block_hashes or (), record.request_id)


def branch_of(record: Record) -> Branch | None:
    if record.branch_tokens is None or record.branch_hash is None:
        return None
    return Branch(record.branch_tokens, record.branch_hash)


def block_hashes(values: "array[int]") -> Sequence[BlockHash]:
    return values  # type: ignore[return-value]  # BlockHash is an int


class Groups:
    """Union-find over numbered items."""

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

    def join(self, first: int, second: int) -> None:
        low, high = sorted((self.find(first), self.find(second)))
        self._parents[high] = low


def group_requests(
    read: Callable[[], Iterable[Record]], block_size: int, *, output_substitution: bool
) -> Mapping[RequestId, int]:
    """Map requests that share sessions or output blocks to one group number. ``read`` iterates once or twice."""
    groups = Groups()
    items: dict[RequestId, int] = {}
    names: dict[str, int] = {}
    owners: dict[BlockHash, int] = {}
    prompt_tokens_in: dict[BlockHash, int] = {}
    for record in read():
        item = items[record.request_id] = groups.add()
        for name in _names(record):
            groups.join(names.setdefault(name, item), item)
        for block in _generated(record) if output_substitution else ():
            groups.join(owners.setdefault(block, item), item)
            prompt_tokens_in.setdefault(block, 0)
        if output_substitution and record.output_block_hashes is not None:
            prompt_tokens_in[unfilled_block(record)] = (record.prompt_tokens or 0) % block_size
    if owners:
        for record in read():
            blocks = list(record.block_hashes or ())
            branch = record_branch(record, block_size)
            if branch is not None and branch.tokens > prompt_tokens_in.get(branch.earlier, 0):
                blocks.append(branch.earlier)  # the prompt continues part of an output
            _join_owners(groups, items[record.request_id], blocks, owners)
    numbers: dict[int, int] = {}
    return {request_id: numbers.setdefault(groups.find(item), len(numbers)) for request_id, item in items.items()}


def _generated(record: Record) -> list[BlockHash]:
    """Blocks with output tokens, including the partly filled last block if its name can occur."""
    if record.output_block_hashes is None:
        return []
    return [*record.output_block_hashes, tail_key(record.chain(), record.request_id)]


def _names(record: Record) -> list[str]:
    """Keys that group a request with others: its id (for its children), its parent, its session."""
    names = [f"request {record.request_id}"]
    if record.parent_id is not None:
        names.append(f"request {record.parent_id}")
    if record.session_id is not None:
        names.append(f"session {record.session_id}")
    return names


def _join_owners(groups: Groups, item: int, blocks: Iterable[BlockHash], owners: Mapping[BlockHash, int]) -> None:
    """Join a request with the requests that generated blocks of its prompt."""
    for block in blocks:
        owner = owners.get(block)
        if owner is not None:
            groups.join(owner, item)
