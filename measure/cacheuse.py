"""Numbers of a prefix cache, as ``sim curve`` and ``sim misses`` print and show them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUse:
    """Use of a cache of one size by one group."""

    name: str
    requests: int
    sessions: int | None
    """Null: no request of it names a session."""
    shared_tokens: int | None
    """Prompt tokens, in full blocks, that all its requests begin with. Null: of several groups."""
    example: str | None
    """Id of its first request. Null: of several groups."""
    input_tokens: int
    lookup_blocks: int
    hit_blocks: int
    hit_tokens: int
    """Tokens saved: prompt tokens that need no prefill."""
    hit_rate: float
    hit_share: float
    """Of all groups' hits."""
    inserted_blocks: int
    inserted_share: float
    held_share: float
    """Of the blocks that the cache holds, averaged over requests; a block belongs to the group that touched it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """All groups in a cache of one size."""

    blocks: int
    tokens: int
    groups: list[GroupUse]
    """Groups with the most hits first; all others are one, the last."""
    others: int
    """Number of groups in the last."""
    largest_other: int
    """Hit tokens of the largest group in the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHits:
    """Hits under a policy of eviction by cache size, as ``sim curve`` once printed them. Lists of one length."""

    evict: str
    sizes: list[int]
    hit_blocks: list[int]
    gain: list[float]
    gain_error: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """The prompt tokens of some requests by cause; they add up to ``input_tokens``."""

    name: str
    requests: int
    input_tokens: int
    tokens: dict[str, int]
    """By cause, as docs/curves.md defines them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distances between two accesses of one block, over all accesses but first ones."""

    unit: str
    count: int
    mean: float | None
    """Null: there are none."""
    quantiles: list[float]
    """At even levels up to 1: the smallest value that at least that share does not exceed. Empty: there are none."""

    def at(self, level: float) -> float:
        return self.quantiles[round(level * len(self.quantiles)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Blocks touched in one interval of time."""

    start_ms: float
    requests: int
    accesses: int
    distinct_blocks: int
    """The working set: different blocks touched."""
    new_blocks: int
    seen_blocks: int
    """Different blocks touched from the trace's beginning to the window's end: the content of an unlimited cache."""
