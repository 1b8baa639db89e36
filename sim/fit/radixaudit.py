"""``sim audit`` of SGLang: reported cached tokens beside those of its radix cache's rules at the captured times.

A prompt is looked up when its prefill begins: at its arrival, or when the batch before its own had its first tokens.
Prompts are cached at their first token, outputs at their end. Lookups at every other moment between arrival and first
token are tested, too: the clock does not tell them apart.
"""

import argparse
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from measure.table import table_lines
from sim.sglang.config import RadixConfig
from sim.sglang.radix import RadixNode, RadixTree
from sim.workload.chain import Chains, is_private, tokens_computed
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule
from tracefile.records.schema import Engine, Meta, Record

if TYPE_CHECKING:
    from tracefile import outputs
    from tracefile.hashing import tokenchains
else:  # numpy, which the flags need not
    outputs = LateModule("tracefile.outputs")
    tokenchains = LateModule("tracefile.hashing.tokenchains")

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose two counts differ."""

    request_id: str
    reported: int
    predicted: int | None
    """None: the rules never admit it."""
    preemptions: int
    cause: str


def difference_lines(differences: Sequence[Difference]) -> list[str]:
    """Return a table of the first differences, and the causes of the others; nothing if there are none."""
    if not differences:
        return []
    rows = [
        [one.request_id[:32], f"{one.reported:,}", f"{one.predicted or 0:,}", one.cause] for one in differences[:_SHOWN]
    ]
    more = Counter(one.cause for one in differences[_SHOWN:])
    return [
        *table_lines(["request", "reported", "rules", "cause"], rows, "<>><"),
        *(f"and {count} more: {cause}" for cause, count in more.most_common()),
    ]


SAME_BATCH, SAME_BATCH_MS = 0.2, 2.0
"""Share of the median gap between tokens, and milliseconds."""


class Moment(NamedTuple):
    """Change of the cache; at the same time, what is cached comes before who looks it up."""

    at_ms: float
    rank: int
    place: int
    kind: str
    """arrival, lookup, first or end."""


@dataclass(slots=True)
class Served:
    """A request as the cache sees it."""

    record: Record
    keys: list[int]
    arrival_ms: float
    first_ms: float
    end_ms: float
    hits: int | None = None
    node: RadixNode | None = None
    seen: dict[int, str] = field(default_factory=dict)
    """Hits of a lookup at another moment, each with the moment in words."""

    @property
    def prompt_tokens(self) -> int:
        return self.record.prompt_tokens or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """Reported cached tokens of a trace and those of an engine's rules, side by side."""

    requests: int
    exact: int
    prompt_tokens: int
    reported_tokens: int
    predicted_tokens: int
    differences: list[Difference]

    @property
    def exact_share(self) -> float:
        return self.exact / self.requests

    def described(self, path: str, rules: str, lost: str, settings: Sequence[str]) -> str:
        """Return the audit for a terminal; ``lost``: evictions in words."""
        reported, predicted = (tokens / self.prompt_tokens for tokens in (self.reported_tokens, self.predicted_tokens))
        lines = [
            f"{path}: {self.exact:,} of {self.requests:,} requests ({self.exact_share:.1%}) have the cached tokens "
            f"that {rules} them",
            f"of {self.prompt_tokens:,} prompt tokens cached: {reported:.2%} reported, {predicted:.2%} by the rules; "
            f"{lost}",
        ]
        return "\n".join([*lines, *settings, *difference_lines(self.differences)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RadixAudit(Audited):
    """Audit by SGLang's rules."""

    config: RadixConfig
    block_size: int
    """Tokens to which the trace tells what prompts share."""
    evicted_tokens: int


def add_radix_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("SGLang", "for its captures, instead of vLLM's settings").add_argument
    add(
        "--kv-tokens", type=int, metavar="N", help="usable tokens (default: max_total_num_tokens of the trace's header)"
    )
    add("--page-size", type=int, metavar="P", help="tokens in a page (default: the header's, else 1)")


def radix_settings(engine: Engine | None, arguments: argparse.Namespace) -> RadixConfig:
    """Return SGLang's settings: those given by flags, else the header's."""
    engine = engine or Engine()
    told = engine.extra.get("max_total_num_tokens")
    return RadixConfig(
        page_size=arguments.page_size or engine.block_size or 1,
        max_total_num_tokens=arguments.kv_tokens or (told if isinstance(told, int) else None),
    )


def audit_radix(meta: Meta, records: Sequence[Record], config: RadixConfig) -> RadixAudit:
    """Run the trace's requests at their times through the radix cache, and compare."""
    size = meta.block_size or 1
    records = list(map(outputs.infer_outputs(meta, records).fill, records))
    if config.page_size < size and meta.hash is not None and meta.hash.branches:
        chains_of_tokens = tokenchains.TokenChains(tokenchains.branches_of(records, size))
        meta, records = tokenchains.opened_meta(meta), list(map(chains_of_tokens.expand, records))
    chains = Chains(meta, max(config.page_size, meta.block_size or 1))
    run = _RadixRun(list(_served(records, chains)), config, chains.block_size)
    run.run()
    return _compare(run, config, chains.block_size)


def _served(records: Sequence[Record], chains: Chains) -> Iterator[Served]:
    for record in records:
        end_ms = record.end_ms()
        if record.arrival_ms is None or end_ms is None or not record.prompt_tokens:
            continue
        if record.status == "error" and not record.output_tokens:
            continue
        first_ms = end_ms if record.ttft_ms is None else record.arrival_ms + record.ttft_ms
        yield Served(record, chains.begun(record), record.arrival_ms, first_ms, end_ms)


class _RadixRun:
    """The requests at their times against one tree."""

    def __init__(self, served: list[Served], config: RadixConfig, block_size: int) -> None:
        self.served = served
        self.tree = RadixTree(block_size)
        self._config = config
        self._open: dict[int, Served] = {}
        """By place: requests that have arrived and have no token yet."""

    def run(self) -> None:
        for moment in sorted(self._moments()):
            request = self.served[moment.place]
            if moment.kind == "arrival":
                self._open[moment.place] = request
                self._look(request, "at its arrival")
            elif moment.kind == "lookup":
                self._look_up(request)
            elif moment.kind == "first":
                self._open.pop(moment.place, None)
                self._cache(request, request.prompt_tokens)
                self._look_all(f"after the first token of {request.record.request_id[:12]}")
            else:
                self._end(request)
                self._look_all(f"after the end of {request.record.request_id[:12]}")

    def _moments(self) -> Iterator[Moment]:
        firsts = sorted(request.first_ms for request in self.served)
        same_batch_ms = self._same_batch_ms()
        for place, request in enumerate(self.served):
            before = bisect_left(firsts, request.first_ms - same_batch_ms)
            lookup_ms = max(request.arrival_ms, firsts[before - 1]) if before else request.arrival_ms
            yield Moment(request.arrival_ms, 2, place, "arrival")
            yield Moment(lookup_ms, 3, place, "lookup")
            yield Moment(request.first_ms, 0, place, "first")
            yield Moment(request.end_ms, 1, place, "end")

    def _same_batch_ms(self) -> float:
        """Time within which first tokens are taken for those of one batch: a share of the usual gap between tokens."""
        gaps = [gap for request in self.served for gap in request.record.itl_ms]
        return max(SAME_BATCH_MS, SAME_BATCH * median(gaps)) if gaps else SAME_BATCH_MS

    def _look_up(self, request: Served) -> None:
        most = 0 if request.record.prompt_logprobs else self._pages(request.prompt_tokens - 1)
        request.node = self.tree.match(request.keys, most)
        request.hits = request.node.end
        self.tree.lock(request.node)
        self._make_room(request.prompt_tokens - request.hits)

    def _cache(self, request: Served, tokens: int) -> None:
        reached = self.tree.insert(request.keys, self._pages(tokens))
        if request.node is not None:
            self.tree.unlock(request.node)
        self.tree.lock(reached)
        request.node = reached

    def _end(self, request: Served) -> None:
        computed = tokens_computed(request.record)
        self._make_room(computed - request.prompt_tokens)
        self._cache(request, computed)
        if request.node is not None:
            self.tree.unlock(request.node)
            request.node = None

    def _make_room(self, tokens: int) -> None:
        room = self._config.max_total_num_tokens
        if room is not None:
            self.tree.evict(tokens - (room - self.tree.tokens))

    def _look_all(self, moment: str) -> None:
        for request in self._open.values():
            self._look(request, moment)

    def _look(self, request: Served, moment: str) -> None:
        hits = self.tree.matching(request.keys, self._pages(request.prompt_tokens - 1))
        request.seen.setdefault(hits, moment)

    def _pages(self, tokens: int) -> int:
        return tokens // self._config.page_size * self._config.page_size


def _compare(run: _RadixRun, config: RadixConfig, block_size: int) -> RadixAudit:
    judged = [request for request in run.served if request.record.cached_tokens is not None]
    if not judged:
        raise InputError("cached_tokens: no record has any; expected an SGLang started with --enable-cache-report")
    first_user = _first_users(run.served)
    differences = []
    for place, request in enumerate(run.served):
        reported, hits = request.record.cached_tokens, request.hits or 0
        if reported is None or _to_the_block(reported, config, block_size) == hits:
            continue
        cause = _cause(place, request, config, block_size, first_user)
        differences.append(Difference(request.record.request_id, reported, request.hits, 0, cause))
    return RadixAudit(
        config=config,
        block_size=block_size,
        requests=len(judged),
        exact=len(judged) - len(differences),
        prompt_tokens=sum(request.prompt_tokens for request in judged),
        reported_tokens=sum(request.record.cached_tokens or 0 for request in judged),
        predicted_tokens=sum(request.hits or 0 for request in judged),
        evicted_tokens=run.tree.evicted_tokens,
        differences=differences,
    )


def _to_the_block(reported: int, config: RadixConfig, block_size: int) -> int:
    """Return the reported tokens as far as the trace tells what is shared."""
    return reported // block_size * block_size if block_size > config.page_size else reported


def _cause(place: int, request: Served, config: RadixConfig, block_size: int, first_user: dict[int, int]) -> str:
    reported, hits = request.record.cached_tokens or 0, request.hits or 0
    if reported % config.page_size:
        return f"reported is no multiple of {config.page_size}: another page size"
    told = _to_the_block(reported, config, block_size)
    if told in request.seen:
        return f"order: agrees if looked up {request.seen[told]}"
    if reported < hits:
        return "less than is cached by the rules: evicted, or the cache was reset"
    key = request.keys[told // block_size - 1]
    if is_private(key):
        return "reported reaches beyond the hashes that the trace has of it"
    if first_user[key] == place:
        return "cached before the capture, or part of an output whose ids are unknown"
    return "more than is cached by the rules"


def _first_users(served: Sequence[Served]) -> dict[int, int]:
    """Place of the request that first arrived with each key."""
    found: dict[int, int] = {}
    for place in sorted(range(len(served)), key=lambda place: served[place].arrival_ms):
        for key in served[place].keys:
            found.setdefault(key, place)
    return found


def describe_radix(audit: RadixAudit, path: str) -> str:
    config = audit.config
    room = "unlimited" if config.max_total_num_tokens is None else f"{config.max_total_num_tokens:,} tokens"
    exactness = "the token" if audit.block_size == 1 else f"{audit.block_size} tokens"
    settings = [f"{room} in pages of {config.page_size}; what prompts share is known to {exactness}"]
    rules = "the rules of SGLang's radix cache give"
    return audit.described(path, rules, f"{audit.evicted_tokens:,} tokens evicted", settings)
