"""Use of a cache of one size by groups of requests: tokens saved, blocks brought in, blocks held."""

import numpy as np

from measure.cache.accesses import Accesses
from measure.cache.stackdepth import access_depths, resident_owners
from measure.cacheuse import CacheUse, GroupUse
from measure.table import table_lines
from sim.workload.accesses import GroupedAccesses
from sim.workload.groups import Grouping, Groups, short_name
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.sessions import NO_CHAINS


def cache_use(accesses: GroupedAccesses, grouping: Grouping, sizes: list[int]) -> list[CacheUse]:
    if accesses.groups is None or not len(accesses.limits):
        return []
    needs, request_of = needed_sizes(accesses), accesses.request_of
    uses = []
    for size in sizes:
        hit = needs <= min(size, accesses.distinct)
        hits = np.bincount(request_of[hit], minlength=len(accesses.limits))
        uses.append(_use(accesses, accesses.groups, grouping.most, hits, size))
    return uses


def needed_sizes(accesses: Accesses) -> IntArray:
    """The smallest cache in which each access hits; more than there are blocks: it hits in none."""
    depths, _ = access_depths(accesses.blocks, accesses.starts, accesses.distinct)
    never = accesses.distinct + 1
    depths[(depths == 0) | ~accesses.may_hit] = never
    # One running maximum over all: a request's values lie above all values of the request before it.
    base = accesses.request_of * (never + 1)
    return np.asarray(np.maximum.accumulate(base + depths) - base)


def _use(accesses: Accesses, groups: Groups, most: int, request_hits: IntArray, size: int) -> CacheUse:
    shown, place = groups.largest(request_hits, most)
    names, block_size = groups.shown_names(shown), accesses.block_size
    count, others = len(names), len(groups.names) - len(shown)
    nothing = [None] * (count - len(shown))
    inserted, held = resident_owners(accesses.blocks, accesses.starts, place, count, size)
    of_group = np.bincount(groups.of_request, request_hits, len(groups.names))
    hits, tokens, lookups = (
        np.bincount(place, weights, count).astype(np.int64)
        for weights in (request_hits, accesses.prompt_tokens, accesses.lookup_blocks)
    )
    columns = zip(
        names,
        np.bincount(place, minlength=count).tolist(),
        _sessions(groups, place, count),
        (groups.shared_blocks[shown] * block_size).tolist() + nothing,
        [groups.examples[number] for number in shown] + nothing,
        tokens.tolist(),
        lookups.tolist(),
        hits.tolist(),
        (hits * block_size).tolist(),
        _shares(hits * block_size, tokens).tolist(),
        _shares(hits, hits.sum()).tolist(),
        inserted.tolist(),
        _shares(inserted, inserted.sum()).tolist(),
        _shares(held, held.sum()).tolist(),
        strict=True,
    )
    fields = GroupUse.__slots__
    rest = np.delete(of_group, shown)
    return CacheUse(
        blocks=size,
        tokens=size * block_size,
        groups=[GroupUse(**dict(zip(fields, row, strict=True))) for row in columns],
        others=others,
        largest_other=int(rest.max(initial=0)) * block_size,
    )


def _sessions(groups: Groups, place: IntArray, count: int) -> list[int | None]:
    """Number of sessions that the requests at each place name; None: they name none."""
    named = groups.session_of >= 0
    pairs = np.unique(np.stack([place[named], groups.session_of[named]]), axis=1)
    return [number or None for number in np.bincount(pairs[0], minlength=count).tolist()]


def _shares(parts: IntArray, whole: object) -> FloatArray:
    return np.asarray(parts / np.maximum(np.asarray(whole, float), 1.0))


def describe_groups(groups: Groups | None, uses: list[CacheUse]) -> list[str]:
    if groups is None:
        return []
    lines = ["", groups.rule] if groups.rule else []
    if NO_CHAINS in groups.rule:
        return lines
    for use in uses:
        lines += _describe_use(use)
    return lines


def _describe_use(use: CacheUse) -> list[str]:
    headings = ["group", "tokens saved", "% of saved", "hit rate", "requests", "sessions", "shared tokens"]
    headings += ["% of inserted", "% of held", "example"]
    rows = [
        [
            short_name(group.name),
            f"{group.hit_tokens:,}",
            f"{group.hit_share:.2%}",
            f"{group.hit_rate:.2%}",
            f"{group.requests:,}",
            *("–" if number is None else f"{number:,}" for number in (group.sessions, group.shared_tokens)),
            f"{group.inserted_share:.2%}",
            f"{group.held_share:.2%}",
            group.example or "–",
        ]
        for group in use.groups
    ]
    lines = ["", f"{use.blocks:,} usable blocks ({use.tokens:,} tokens)", *table_lines(headings, rows, "<")]
    if use.others:
        lines.append(f"each of the {use.others:,} others saves at most {use.largest_other:,} tokens")
    return lines
