"""Who uses an LRU cache of one size: each group's hits, what it puts in, and how much of the cache it holds."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measure.stackdepth import access_depths, resident_owners
from sim.workload.accesses import Accesses
from sim.workload.groups import Grouping
from tracefile.records.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUse:
    """One group in a cache of one size."""

    name: str
    requests: int
    input_tokens: int
    lookup_blocks: int
    hit_blocks: int
    hit_rate: float
    """Hit tokens over the group's own prompt tokens."""
    hit_share: float
    """Of all groups' hits."""
    inserted_blocks: int
    """Blocks put in because they were not there."""
    inserted_share: float
    held_share: float
    """Of the blocks that the cache holds, averaged over requests; a block is whose request touched it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """All groups in a cache of one size."""

    blocks: int
    tokens: int
    groups: list[GroupUse]


def cache_use(accesses: Accesses, grouping: Grouping, sizes: list[int]) -> list[CacheUse]:
    """The groups' use of a cache at each of ``sizes``, in blocks."""
    if accesses.groups is None or not len(accesses.limits):
        return []
    names, place = accesses.groups.largest(accesses.prompt_tokens, grouping.most)
    needs = needed_sizes(accesses)
    owner = place[accesses.request_of]
    uses = []
    for size in sizes:
        hit = needs <= min(size, accesses.distinct)
        uses.append(_use(accesses, names, place, np.bincount(owner[hit], minlength=len(names)), size))
    return uses


def needed_sizes(accesses: Accesses) -> IntArray:
    """The smallest cache in which each access hits; more than there are blocks: it hits in none."""
    depths, _ = access_depths(accesses.blocks, accesses.starts, accesses.distinct)
    never = accesses.distinct + 1
    depths[(depths == 0) | ~accesses.may_hit] = never
    # One running maximum over all: a request's values lie above all values of the request before it.
    base = accesses.request_of * (never + 1)
    return np.asarray(np.maximum.accumulate(base + depths) - base)


def _use(accesses: Accesses, names: list[str], place: IntArray, hits: IntArray, size: int) -> CacheUse:
    count = len(names)
    inserted, held = resident_owners(accesses.blocks, accesses.starts, place, count, size)
    tokens = np.bincount(place, accesses.prompt_tokens, count)
    lookups = np.bincount(place, np.diff(accesses.starts), count)
    requests = np.bincount(place, minlength=count)
    rates = _shares(hits * accesses.block_size, tokens)
    columns = zip(
        names,
        requests.tolist(),
        tokens.astype(int).tolist(),
        lookups.astype(int).tolist(),
        hits.tolist(),
        rates.tolist(),
        _shares(hits, hits.sum()).tolist(),
        inserted.tolist(),
        _shares(inserted, inserted.sum()).tolist(),
        _shares(held, held.sum()).tolist(),
        strict=True,
    )
    fields = GroupUse.__slots__
    groups = [GroupUse(**dict(zip(fields, row, strict=True))) for row in columns]
    return CacheUse(blocks=size, tokens=size * accesses.block_size, groups=groups)


def _shares(parts: IntArray, whole: object) -> npt.NDArray[np.float64]:
    return np.asarray(parts / np.maximum(np.asarray(whole, float), 1.0))
