"""A KV cache of several groups over one block pool, as vLLM's: what a request hits, holds, frees and caches; and the
scheduler over it.

The rules are those of vLLM 0.32's ``kv_cache_coordinator`` and ``kv_cache_manager``. A hit ends where all groups have
what they need, at a multiple of the layout's alignment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from sim.vllm.config import EngineConfig
from sim.vllm.kvgroups import KvLayout
from tests.sim.oracles.readable.groupcache import NULL, ChunkGroup, Group, Progress, Rows, Table, WindowGroup
from tests.sim.oracles.readable.pool import BlockPool
from tests.sim.oracles.readable.request import Request
from tests.sim.oracles.readable.rules import blocks_for
from tests.sim.oracles.readable.scheduler import Scheduler, Step
from tests.sim.oracles.readable.statecache import StateGroup, state_end, stores_inside
from tracefile.records.schema import MOST_TOKENS

_GROUPS = {"window": WindowGroup, "chunk": ChunkGroup, "mamba": StateGroup, "mamba2": StateGroup}


class Hits(NamedTuple):
    """Prefix hit of a prompt: blocks by group, and the tokens common to all groups."""

    blocks: list[list[int]]
    tokens: int


class Alike(NamedTuple):
    """Equal KV cache groups, which share a prefix lookup."""

    groups: list[Group]
    drops_last: bool

    @property
    def first(self) -> Group:
        return self.groups[0]


@dataclass(slots=True)
class HybridCache:
    """The groups of ``layout`` over one pool. ``in_flight``: most tokens of a request in steps not finished yet."""

    layout: KvLayout
    pool: BlockPool
    in_flight: int
    max_model_len: int
    groups: list[Group] = field(init=False)
    alike: list[Alike] = field(init=False)
    _held: dict[Request, list[Table]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens_of: dict[int, int] = {}
        specs, caching = self.layout.groups, self.pool.enable_prefix_caching
        # Without a prefix cache a state never needs a second block.
        kinds = [Group if spec.keeps_state and not caching else _GROUPS.get(spec.kind, Group) for spec in specs]
        self.groups = [
            kind(spec, position, self.layout, self.pool, tokens_of)
            for position, (kind, spec) in enumerate(zip(kinds, specs, strict=True))
        ]
        for group in self.groups:
            group.limit(self.in_flight, self.max_model_len)
            if group.spec.keeps_state and not caching:
                group.size = self.max_model_len
        alike = [[g for g in self.groups if g.spec == spec] for spec in dict.fromkeys(specs)]
        alike.sort(key=lambda groups: not groups[0].spec.sees_all)
        self.alike = [Alike(groups, any(group.drops_last for group in groups)) for groups in alike]

    def look_up(self, request: Request) -> Hits:
        """Return the longest hit of ``request``'s known tokens; the last one is always computed."""
        nothing = Hits([[] for _ in self.groups], 0)
        request.shared_tokens = 0
        if not self.pool.enable_prefix_caching or request.prompt_logprobs:
            return nothing
        if len(self.groups) == 1:
            peers = self.alike[0]
            rows, tokens = self._find(peers, request, request.num_tokens - 1, drops_last=peers.drops_last)
            return Hits([[row[0] if row else NULL for row in rows]], tokens)
        return self._agree(request, nothing.blocks)

    def _find(self, peers: Alike, request: Request, most: int, drops_last: bool) -> tuple[Rows, int]:
        cached = partial(self._cached, [group.position for group in peers.groups], request.hashes)
        return peers.first.find(cached, most, request.num_tokens // self.layout.match_unit, drops_last=drops_last)

    def _cached(self, positions: Sequence[int], hashes: Sequence[int], units: int) -> list[int] | None:
        base, row = hashes[units - 1] * len(self.groups), []
        for position in positions:
            block = self.pool.first_of(base + position)
            if block is None:
                return None
            row.append(block)
        return row

    def _most(self, peers: Alike, request: Request, tokens: int) -> int:
        """Tokens to look up for a hit of ``tokens`` after the last block is dropped; states drop none."""
        if not peers.drops_last or peers.first.spec.keeps_state:
            return tokens
        unit = self.layout.match_unit
        margin = unit if self.layout.partial_hits and peers.first.spec.sees_all else peers.first.size
        return min(tokens + margin, request.num_tokens // unit * unit)

    def _agree(self, request: Request, blocks: list[list[int]]) -> Hits:
        """Shorten the prefix hit, form after form, until all groups agree."""
        alike, most, longest = self.alike, request.num_tokens - 1, 0
        result: list[tuple[Rows, int] | None] = [None] * len(alike)
        dropped: set[int] = set()
        while True:
            tokens = most
            for position, peers in enumerate(alike):
                before = result[position]
                if peers.first.spec.sees_all and before is not None:
                    tokens = min(tokens, before[1])
                    continue
                drops = peers.drops_last and position not in dropped
                rows, now = self._find(peers, request, self._most(peers, request, tokens) if drops else tokens, drops)
                if drops:
                    dropped.add(position)
                elif now < tokens:
                    dropped.clear()
                tokens = now
                result[position] = rows, now
                longest = max(longest, now)
            if tokens >= most:
                break
            most = tokens
            if len(alike) == 2 and alike[0].first.spec.sees_all:
                break
        for peers, (rows, _) in zip(alike, filter(None, result), strict=True):
            if peers.first.spec.sees_all:
                del rows[blocks_for(most, peers.first.size) :]
            for column, group in enumerate(peers.groups):
                blocks[group.position] = [row[column] if row else NULL for row in rows]
        request.shared_tokens = longest if longest > most else 0
        return Hits(blocks, most)

    def admit(self, request: Request, hits: Hits, tokens: int) -> bool:
        """Give ``request`` its hits and blocks for ``tokens`` more, if all of it fits now; else change nothing."""
        computed, end_tokens = hits.tokens, min(request.num_tokens, self.max_model_len)
        held = [Table() for _ in self.groups]
        for end, capped in ((end_tokens, True), (computed + tokens, False)):
            if self._needs(request, held, hits.blocks, computed, end, capped=capped) > self.pool.num_free:
                return False
        if any(hits.blocks):
            for group, table, blocks in zip(self.groups, held, hits.blocks, strict=True):
                group.adopt(table, blocks, computed)
        self._held[request] = held
        self._grow(request, held, computed + tokens)
        return True

    def extend(self, request: Request, end: int) -> bool:
        """Free the blocks that attention has passed, then allocate up to ``end``; False: too few free blocks."""
        held = self._held[request]
        for group, table in zip(self.groups, held, strict=True):
            group.free_skipped(table, max(0, request.num_computed - request.tokens_in_flight))
        nothing: list[list[int]] = [[] for _ in self.groups]
        if self._needs(request, held, nothing, request.num_computed, end, capped=False) > self.pool.num_free:
            return False
        self._grow(request, held, end)
        return True

    def _needs(
        self, request: Request, held: list[Table], hits: list[list[int]], computed: int, end: int, *, capped: bool
    ) -> int:
        prefill_end = max(request.prompt_tokens, request.num_tokens - 1) if self.layout.retain == 0 else 0
        return sum(
            group.needs(table, blocks, computed, end, prefill_end, capped=capped)
            for group, table, blocks in zip(self.groups, held, hits, strict=True)
        )

    def _grow(self, request: Request, held: list[Table], end: int) -> None:
        for group, table in zip(self.groups, held, strict=True):
            group.grow(table, end)
        self.cache_blocks(request, min(end, request.num_tokens))

    def cache_blocks(self, request: Request, tokens: int) -> None:
        """Cache the blocks that the known ``tokens`` of ``request`` fill."""
        if not self.pool.enable_prefix_caching:
            return
        held = self._held[request]
        progress = Progress(request.hashes, request.prompt_tokens, request.shared_tokens)
        for group, table in zip(self.groups, held, strict=True):
            group.cache_blocks(table, progress, self._cacheable(group, tokens))

    def _cacheable(self, group: Group, tokens: int) -> int:
        """Return the leading tokens that a prefix hit can reach."""
        if len(self.groups) == 1:
            return tokens
        aligned = tokens if self.layout.partial_hits else tokens // self.layout.block_size * self.layout.block_size
        return min(tokens, aligned + group.size) if group.drops_last and aligned else aligned

    def free(self, request: Request) -> None:
        for group, table in zip(self.groups, self._held.pop(request, ()), strict=False):
            group.free(table)

    def begin_step(self) -> None:
        for group in self.groups:
            if isinstance(group, StateGroup):
                group.cached_now.clear()

    def end_step(self) -> None:
        """Free the source and target blocks of this step's copies."""
        ends = [block for group in self.groups for pair in group.copies for block in pair]
        if ends:
            self.pool.free_blocks(ends[::-1])
            for group in self.groups:
                group.copies.clear()

    def tables(self, request: Request) -> list[list[int]]:
        """Blocks of ``request`` by group, the null block where it freed them."""
        return [list(table.blocks) for table in self._held.get(request, ())]

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of ``tokens`` holds at a time."""
        return sum(group.most_blocks(tokens) for group in self.groups)


def cache_of(config: EngineConfig, pool: BlockPool) -> HybridCache:
    """Return the cache of an engine's KV groups over ``pool``."""
    assert config.layout is not None
    steps = 2 if config.async_scheduling else 1
    return HybridCache(config.layout, pool, steps * config.max_num_batched_tokens, config.max_model_len or MOST_TOKENS)


class HybridScheduler(Scheduler):
    """``Scheduler`` with the KV groups of ``config.layout``; chunks of a prompt end where states are kept."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.cache = cache_of(config, self.pool)
        self.layout = self.cache.layout
        states = [spec for spec in self.layout.groups if spec.keeps_state]
        self._clips = bool(states) and config.enable_prefix_caching
        self._state_block = states[0].block_size if states else 0
        self._stores_inside = all(spec.kind == "mamba2" for spec in states)

    def accepts(self, request: Request) -> bool:
        fits = self.cache.most_blocks(request.last_token - 1) <= self.config.usable_blocks
        return fits and request.last_token <= self._max_tokens

    def schedule(self) -> Step:
        self.cache.begin_step()
        step = super().schedule()
        self.cache.end_step()
        return step

    def clip(self, request: Request, start: int, tokens: int) -> int:
        """End a prefill chunk at a block boundary, before the last state worth caching, or at that state."""
        prefill_end = max(request.prompt_tokens, request.num_tokens - 1)
        if not self._clips or start >= prefill_end:
            return tokens
        size, unit, layout = self._state_block, self.config.block_size, self.layout
        drops, end = bool(layout.dropping), start + tokens
        retained = unit if layout.partial_hits else size
        checkpoint = state_end(prefill_end, retained, drops)
        inside = self._stores_inside and end >= prefill_end and stores_inside(start, end, checkpoint, unit, size)
        last = 0 if inside else state_end(request.num_tokens, size, drops)
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= self.config.max_num_batched_tokens:
                end = aligned
        stops = [last]
        if start % size and not inside:
            stops.append((start // size + 1) * size)
        tail = state_end(request.prompt_tokens, unit, drops) if layout.partial_hits and not inside else 0
        if last < tail < request.prompt_tokens:
            stops.append(tail)
        boundary = request.shared_tokens
        if start < boundary < end:
            stops.append(start + (boundary - start) // size * size)
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)

    def _look_up(self, request: Request) -> tuple[Hits, int]:
        hits = self.cache.look_up(request)
        return hits, hits.tokens

    def _admit(self, request: Request, hits: Hits, hit_tokens: int, tokens: int) -> bool:
        if not self.cache.admit(request, hits, tokens):
            return False
        request.num_computed = hit_tokens
        return True

    def _extend(self, request: Request, end: int) -> bool:
        return self.cache.extend(request, end)

    def _cache_blocks(self, request: Request, end: int) -> None:
        self.cache.cache_blocks(request, end)

    def _give_back(self, request: Request) -> None:
        self.cache.free(request)
        request.num_computed = request.placeholders = 0


def make_scheduler(config: EngineConfig) -> Scheduler:
    """Return the scheduler of an engine with one KV group or several."""
    return Scheduler(config) if config.kv_groups is None else HybridScheduler(config)
