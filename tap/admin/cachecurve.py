"""Prefix hits of the live traffic at every cache size, from block hashes alone, online and in bounded memory.

The policy is that of ``sim curve``: LRU over full prompt blocks; a request's hits are counted at its arrival, over its
leading blocks and short of its last token; then its blocks are touched leaf to root, so that tails go first. LRU keeps
at every size S the S blocks touched last, so a block's depth in that order says from which size on it hits (Mattson et
al., 1970). Whoever touches a block touches all those before it in its chain, later: along a chain depths only grow,
which is why each block can be judged by itself, and why a sample of blocks is enough.

The ``exact_blocks`` touched last are all held, and hits there are exact. Of the blocks below, those are held whose hash
says so, one in ``1 / rate`` (Waldspurger et al., SHARDS, 2015): such a hit counts 1 / rate times, and its depth is the
exact part and 1 / rate times its place in the rest of the sample. What recurs all the time, a system prompt's blocks,
is in the exact part, so the sample's error does not multiply with a prefix's popularity. Below the exact part, where
blocks return once each, n hits are told with a standard error of √(n (1 − rate) / rate), a million of them to 0.8 % at
a rate of 1/64; a depth of D below it with a relative one of 1 / √(D rate). At rate 1 everything is exact.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from measure.recency import RecencyStack
from tap.admin.window import Window

EXACT_BLOCKS: Final = 65_536
SAMPLE_BLOCKS: Final = 65_536
RATE: Final = 1 / 64
"""Together: exact to a million tokens of 16-token blocks, sampled to 67 million."""
_LOW_BITS: Final = (1 << 24) - 1
_PER_OCTAVE: Final = 8

SIZES: Final = tuple(sorted({round(2 ** (step / _PER_OCTAVE)) for step in range(24 * _PER_OCTAVE + 1)}))
"""Cache sizes in blocks at which hits are told: an eighth of an octave apart, up to 2²⁴."""


@dataclass(slots=True)
class HitCounts:
    """Hits of some requests by the smallest of ``SIZES`` that has them, and what they are a share of."""

    blocks: list[float] = field(default_factory=lambda: [0.0] * (len(SIZES) + 1))
    """The last one: deeper than any size."""
    requests: int = 0
    prompt_tokens: int = 0
    """Of hashed requests: what ``blocks`` is to be divided by."""
    reported_tokens: int = 0
    """Prompt tokens of requests whose engine said how many it had cached."""
    cached_tokens: int = 0
    """Those that it had."""

    def add(self, other: "HitCounts") -> None:
        """Add other requests."""
        self.blocks = [mine + theirs for mine, theirs in zip(self.blocks, other.blocks, strict=True)]
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.reported_tokens += other.reported_tokens
        self.cached_tokens += other.cached_tokens

    def up_to_size(self) -> list[float]:
        """Blocks hit by a cache of each of ``SIZES``."""
        total, hits = 0.0, []
        for count in self.blocks[:-1]:
            total += count
            hits.append(total)
        return hits


class CacheCurve:
    """Takes requests in order; tells the hits of the recent ones at every size."""

    def __init__(
        self,
        block_size: int,
        *,
        exact_blocks: int = EXACT_BLOCKS,
        sample_blocks: int = SAMPLE_BLOCKS,
        rate: float = RATE,
    ) -> None:
        self.block_size = block_size
        self._exact = RecencyStack(exact_blocks)
        self._sample = RecencyStack(sample_blocks)
        self._weight = 1.0 / rate
        self._threshold = round(rate * (_LOW_BITS + 1))
        """A block is in the sample if its hash's low bits are below it: our hashes are uniform."""
        self._sampled_exact = 0
        """Blocks of the sample that are in the exact part."""
        self._window = Window(HitCounts)

    @property
    def exact_blocks(self) -> int:
        """The largest cache whose hits are exact, in blocks."""
        return self._exact.capacity

    @property
    def deepest(self) -> int:
        """The largest cache that is told of, in blocks."""
        return self._exact.capacity + int(self._sample.capacity * self._weight)

    def take(self, hashes: Sequence[int], prompt_tokens: int, cached_tokens: int | None, now_s: float) -> int:
        """Count one request and touch its blocks; returns how many leading ones were among the last touched."""
        counts = self._window.bucket(now_s)
        counts.requests += 1
        counts.prompt_tokens += prompt_tokens
        if cached_tokens is not None:
            counts.reported_tokens += prompt_tokens
            counts.cached_tokens += cached_tokens
        limit = max(0, min(len(hashes), (prompt_tokens - 1) // self.block_size))
        depths = self._exact.depths(hashes)
        _count_depths(counts, depths[:limit], 1.0)
        _count_depths(counts, self._sampled_depths(hashes[len(depths) : limit]), self._weight)
        self._touch(hashes)
        return len(depths)

    def recent(self, now_s: float) -> HitCounts:
        """The requests of the last minutes."""
        total = HitCounts()
        for counts in self._window.buckets(now_s):
            total.add(counts)
        return total

    def check_integrity(self) -> None:
        """Raise AssertionError if the parts disagree."""
        self._exact.check_integrity()
        self._sample.check_integrity()
        assert self._sampled_exact == sum(self._in_sample(block) for block in self._exact)

    def _sampled_depths(self, below: Sequence[int]) -> list[float]:
        """Depths of the sampled ones of leading blocks that are below the exact part."""
        threshold, weight = self._threshold, self._weight
        sampled = [block for block in below if block & _LOW_BITS < threshold]
        first = self._sampled_exact + 1
        return [len(self._exact) + 1 + (place - first) * weight for place in self._sample.depths(sampled)]

    def _touch(self, hashes: Sequence[int]) -> None:
        threshold = self._threshold
        leaf_to_root = hashes[::-1]
        sampled = [block for block in leaf_to_root if block & _LOW_BITS < threshold]
        self._sampled_exact += sum(block not in self._exact for block in sampled)
        # One that had to leave may have come back as an ancestor, and left again.
        gone = {block for block in self._exact.touch(leaf_to_root) if block not in self._exact}
        self._sampled_exact -= sum(block & _LOW_BITS < threshold for block in gone)
        self._sample.touch(sampled)

    def _in_sample(self, block: int) -> bool:
        return block & _LOW_BITS < self._threshold


def _count_depths(counts: HitCounts, depths: Sequence[float], weight: float) -> None:
    """Add depths, which only grow, to the counts of the sizes that hold them."""
    done = 0
    while done < len(depths):
        size = bisect_left(SIZES, depths[done])
        end = bisect_right(depths, SIZES[size], done) if size < len(SIZES) else len(depths)
        counts.blocks[size] += weight * (end - done)
        done = end
