"""The pool by segments against the pool block by block, with several holders, chunks and preemptions at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from librt.vecs import vec
from mypy_extensions import i64

from sim.vllm.segments import BlockTable, SegmentPool
from tests.sim.oracles.readable.pool import BlockPool

DEEP = 12


@dataclass
class Held:
    """A request in both pools: blocks ``filled`` of ``blocks`` are cached."""

    table: BlockTable
    keys: list[int]
    blocks: list[int] = field(default_factory=list)
    filled: int = 0


@st.composite
def chains(draw: st.DrawFn) -> list[list[int]]:
    """Chains that branch anywhere; equal keys have equal keys before them."""
    made: list[list[int]] = []
    for number in range(draw(st.integers(1, 8))):
        chain: list[int] = []
        if made:
            other = made[draw(st.integers(0, len(made) - 1))]
            chain = other[: draw(st.integers(0, len(other)))]
        made.append(chain + [1000 * (number + 1) + depth for depth in range(len(chain), draw(st.integers(1, DEEP)))])
    return made


def state(pool: BlockPool | SegmentPool) -> tuple[int, int, int]:
    return int(pool.num_free), int(pool.evicted_blocks), int(pool.num_repeated)


class Pools:
    """Both pools; each step runs in both, and the pools are equal after it."""

    def __init__(self, usable: int, requests: Sequence[list[int]], caching: bool) -> None:
        self.plain = BlockPool(usable + 1, 1, caching)
        self.segments = SegmentPool(usable + 1, caching)
        keys = vec[i64]([key for chain in requests for key in chain])
        self.waiting: list[Held] = []
        self.running: list[Held] = []
        first = 0
        for index, chain in enumerate(requests):
            private = [-1000 * (index + 1) - depth for depth in range(len(chain), DEEP + 4)]
            self.waiting.append(Held(BlockTable(keys, index, first, len(chain)), chain + private))
            first += len(chain)

    def admit(self, row: int, more: int) -> None:
        request, most = self.waiting[row], len(self.waiting[row].keys) - 1
        if request.table.preemptions == 0:
            most = min(most, request.table.num_keys)
        hits = self.plain.lookup(request.keys, most)
        assert self.segments.lookup(request.table, most) == len(hits)
        idle = self.plain.count_idle(hits)
        assert self.segments.idle_hits == idle
        if more + idle > self.plain.num_free:
            return
        self.plain.touch(hits)
        assert not hits or self.segments.touch(request.table, len(hits)) == len(hits)
        request.blocks, request.filled = hits, len(hits)
        self.running.append(self.waiting.pop(row))
        self.grow(len(self.running) - 1, more)

    def grow(self, row: int, more: int) -> None:
        request = self.running[row]
        more = min(more, self.plain.num_free, len(request.keys) - len(request.blocks))
        request.blocks = request.blocks + self.plain.allocate(more)
        self.segments.allocate(more)
        request.table.num_blocks += len(request.blocks) - request.table.num_blocks

    def fill(self, row: int, count: int) -> None:
        request = self.running[row]
        end = min(request.filled + count, len(request.blocks))
        self.plain.insert(request.blocks[request.filled : end], request.keys[request.filled : end])
        self.segments.cache_full_blocks(request.table, request.filled, end)
        request.filled = end

    def preempt(self, row: int) -> None:
        request = self.running.pop(row)
        self.plain.free_blocks(request.blocks)
        self.segments.free_blocks(request.table)
        request.table.num_blocks = 0
        request.table.preemptions += 1
        self.waiting.append(request)


@settings(max_examples=200, deadline=None)
@given(chains(), st.integers(1, 40), st.booleans(), st.data())
def test_segments_equal_the_block_pool(
    requests: list[list[int]], usable: int, caching: bool, data: st.DataObject
) -> None:
    pools = Pools(usable, requests, caching)
    for _ in range(data.draw(st.integers(1, 40))):
        name = data.draw(st.sampled_from(["admit", "admit", "grow", "fill", "fill", "preempt"]))
        held = pools.waiting if name == "admit" else pools.running
        if not held:
            continue
        row, count = data.draw(st.integers(0, len(held) - 1)), data.draw(st.integers(0, 6))
        if name == "preempt":
            pools.preempt(row)
        else:
            getattr(pools, name)(row, count)
        assert state(pools.plain) == state(pools.segments)
        assert not pools.segments.not_chained
