"""A block pool of several KV groups: blocks that may have several keys, and the arrays of all that the groups keep.

The rules are those of ``sim.vllm.pool`` and ``sim.vllm.groupcache``, compiled, block by block. Each key of a block is
an entry; entries of one key stand in line, and a lookup gets the first one's block. A running request has a row: a
table for each group.
"""

from typing import Any, NamedTuple

import numpy as np

from measure.machinecode.kernels import kernel, stay_apart
from sim.kernels import layout
from sim.kernels.layout import Ints, Places, Records, record
from sim.kernels.pool import KNOWN, NONE, PRIVATE, first_slot, link_after, private_key, unlink
from sim.vllm import rules
from sim.vllm.config import EngineConfig
from sim.vllm.groupcache import ChunkGroup, Group, WindowGroup
from sim.vllm.hybrid import cache_of
from sim.vllm.pool import BlockPool
from sim.vllm.statecache import StateGroup
from tracefile.records.arrays import UInt64Array

NO_PLACE = -1
_KINDS: tuple[type[Group], ...] = (Group, WindowGroup, ChunkGroup, StateGroup)
FULL, WINDOW, CHUNK, STATE = range(len(_KINDS))
KEYS_PER_BLOCK = 2
"""Room for entries: a block's content, and mostly no prompt's end inside it. Beyond it, keys are not cached."""
RULES = record(
    "alignment block_size partial_hits retain drops max_model_len clips state_block stores_inside step copied "
    "hit_tokens shared_tokens"
)
"""A layout. ``retain`` −1: everywhere; ``clips``: chunks end where states are kept. Of now: the step's number, its
copied blocks, and the last lookup's hit, and the longest one of a group alone, if that is longer."""
GROUP = record("kind block_size span most drops inside form")
"""``most``: blocks that a request holds at most, −1: all; ``inside``: states are also stored inside a step."""
FORM = record("first drops margin start count tokens is_found has_dropped")
"""Groups looked up together. Of the last lookup: blocks from ``start`` to ``count``, and their tokens."""
BLOCK = record("references before after entry tokens")
"""``entry``: its first key's; ``tokens``: up to the end of that key's prefix. Number 0: null block, and the queue."""
ENTRY = record("key tag block next_in_slot before after next_of_block step")
"""A key of a block. ``before``, ``after``: ring of those in line for the key; ``step``: of the first in line, when
the key was last cached as a state; ``next_in_slot``: also of a free entry, the next."""
ROW = record("next launched shared_tokens")
"""A running request; ``launched``: tokens of its last share of a step."""
TABLE = record("count num_cached partial source allocated last_state retired checkpoint checkpoint_place")
"""A request's blocks in one group (``sim.vllm.groupcache.Table``); ``source``: the block at the place ``partial``."""
COPIED = record("group source target")


class KeyedBlocks(NamedTuple):
    """The free queue and the prefix cache."""

    blocks: Records
    entries: Records
    """ENTRY by number, from 1 on."""
    table: Ints
    """By a key's slot, of 2**n: the first in line entered last."""


class GroupPool(NamedTuple):
    """The blocks of several groups, and the requests' tables."""

    settings: Records
    counts: Records
    """As the simple pool's: copies are entries, holds are rows."""
    rules: Records
    groups: Records
    forms: Records
    cache: KeyedBlocks
    keys: UInt64Array
    rows: Records
    """ROW by number, from 1 on."""
    tables: Records
    """TABLE by row and group."""
    places: Places
    """Beside ``tables``: block by place; the null block where attention needs none. Row 0: of the last lookup."""
    copies: Records


def group_pool(config: EngineConfig, settings: Records, keys: UInt64Array, *, rows: int, longest: int) -> GroupPool:
    """Return an empty pool for so many running requests of at most ``longest`` tokens."""
    caching, counts, usable = config.enable_prefix_caching, np.zeros(1, layout.POOL), config.usable_blocks
    cache = cache_of(config, BlockPool(2, config.block_size, enable_prefix_caching=caching))
    kv = cache.layout
    states = [spec for spec in kv.groups if spec.keeps_state]
    told = np.zeros(1, RULES)
    told["alignment"], told["block_size"], told["partial_hits"] = kv.alignment, kv.block_size, kv.partial_hits
    told["retain"], told["drops"] = NO_PLACE if kv.retain is None else kv.retain, bool(kv.dropping)
    told["max_model_len"], told["clips"] = cache.max_model_len, bool(states) and caching
    told["state_block"] = states[0].block_size if states else 1
    told["stores_inside"] = all(spec.kind == "mamba2" for spec in states)
    groups, forms = np.zeros(len(cache.groups), GROUP), np.zeros(len(cache.alike), FORM)
    for number, alike in enumerate(cache.alike):
        first = alike.first
        margin = config.block_size if kv.partial_hits and first.spec.sees_all else first.size
        forms["first"][number], forms["drops"][number] = first.place, alike.drops_last
        forms["margin"][number] = 0 if first.spec.keeps_state else margin
    for group, row in zip(cache.groups, groups, strict=True):
        row["kind"], row["block_size"], row["span"] = _KINDS.index(type(group)), group.size, group.spec.span
        row["most"], row["drops"] = NO_PLACE if group.most is None else group.most, group.drops_last
        row["inside"] = group.spec.kind == "mamba2"
        row["form"] = next((place for place, one in enumerate(cache.alike) if group in one.groups), NO_PLACE)
    blocks = np.zeros(usable + 1, BLOCK)
    blocks["after"], blocks["before"] = np.roll(np.arange(usable + 1), -1), np.roll(np.arange(usable + 1), 1)
    counts["num_free"], held = usable, (rows + 1) * len(groups)
    width = max(rules.blocks_for(longest, group.size) for group in cache.groups) + 1
    return GroupPool(
        settings,
        counts,
        rules=told,
        groups=groups,
        forms=forms,
        cache=KeyedBlocks(
            blocks, np.zeros(KEYS_PER_BLOCK * usable + 2, ENTRY), np.zeros(1 << (2 * usable).bit_length(), np.int32)
        ),
        keys=keys,
        rows=np.zeros(rows + 1, ROW),
        tables=np.zeros(held, TABLE),
        places=np.zeros((held, width), np.int64),
        copies=np.zeros(2 * held + 2, COPIED),
    )


@kernel
def first_in_line(cache: KeyedBlocks, tag: int, key: np.uint64) -> int:
    """Return the first entry in line for a key of a group; NONE: it is not cached."""
    number, entries = cache.table[_slot(cache, tag, key)], cache.entries
    while number != NONE and (np.uint64(entries[number].key) != key or entries[number].tag != tag):
        number = entries[number].next_in_slot
    return int(number)


@kernel
def _slot(cache: KeyedBlocks, tag: int, key: np.uint64) -> np.int64:
    return np.int64(first_slot(key + np.uint64(tag), len(cache.table)))


@kernel
def key_at(pool: GroupPool, request: Any, place: int, units: int) -> tuple[int, np.uint64]:
    """Tag and key of a group's block that ends at so many match units of the request."""
    if units <= request.known_keys:
        return KNOWN * len(pool.groups) + place, pool.keys[request.first_key + units - 1]
    return PRIVATE * len(pool.groups) + place, private_key(request.serial, units - 1)


@kernel
def _has_key(cache: KeyedBlocks, block: int, tag: int, key: np.uint64) -> bool:
    number, entries = cache.blocks[block].entry, cache.entries
    while number != NONE:
        if np.uint64(entries[number].key) == key and entries[number].tag == tag:
            return True
        number = entries[number].next_of_block
    return False


@kernel
def add_key(cache: KeyedBlocks, counts: Any, block: int, tag: int, key: np.uint64) -> None:
    stay_apart()
    if _has_key(cache, block, tag, key):
        return
    entries, number = cache.entries, counts.free_copy
    if number == NONE:
        if counts.num_copies + 1 == len(entries):
            return
        counts.num_copies += 1
        number = counts.num_copies
    else:
        counts.free_copy = entries[number].next_in_slot
    entry, first = entries[number], first_in_line(cache, tag, key)
    entry.key, entry.tag, entry.block, entry.next_of_block, entry.step = np.int64(key), tag, block, NONE, 0
    if first == NONE:
        slot = _slot(cache, tag, key)
        entry.before = entry.after = number
        entry.next_in_slot = cache.table[slot]
        cache.table[slot] = number
    else:
        link_after(entries, entries[first].before, number)
    last = cache.blocks[block].entry
    if last == NONE:
        cache.blocks[block].entry = number
        return
    while entries[last].next_of_block != NONE:
        last = entries[last].next_of_block
    entries[last].next_of_block = number


@kernel
def forget(cache: KeyedBlocks, counts: Any, block: int) -> None:
    """Take all keys of ``block`` out of the cache."""
    while cache.blocks[block].entry != NONE:
        forget_first_key(cache, counts, block)


@kernel
def forget_first_key(cache: KeyedBlocks, counts: Any, block: int) -> None:
    stay_apart()
    entries, number = cache.entries, cache.blocks[block].entry
    entry = entries[number]
    cache.blocks[block].entry = entry.next_of_block
    slot = _slot(cache, entry.tag, np.uint64(entry.key))
    following, before = entry.next_in_slot, cache.table[slot]
    is_first, heir = first_in_line(cache, entry.tag, np.uint64(entry.key)) == number, entry.after
    unlink(entries, number)
    if is_first:
        if heir != number:
            entries[heir].next_in_slot, entries[heir].step = following, entry.step
            following = heir
        if before == number:
            cache.table[slot] = following
        else:
            while entries[before].next_in_slot != number:
                before = entries[before].next_in_slot
            entries[before].next_in_slot = following
    entry.next_in_slot = counts.free_copy
    counts.free_copy = number


@kernel
def hold_block(cache: KeyedBlocks, counts: Any, block: int) -> None:
    if cache.blocks[block].references == 0:
        unlink(cache.blocks, block)
        counts.num_free -= 1
    else:
        counts.num_repeated += 1
    cache.blocks[block].references += 1


@kernel
def take_block(cache: KeyedBlocks, counts: Any) -> int:
    """Take the block at the queue's head, evicting what it cached. The caller has checked num_free."""
    stay_apart()
    block = cache.blocks[0].after
    if cache.blocks[block].entry != NONE:
        forget(cache, counts, block)
        counts.evicted_blocks += 1
    unlink(cache.blocks, block)
    cache.blocks[block].references = 1
    counts.num_free -= 1
    return int(block)


@kernel
def release_block(cache: KeyedBlocks, counts: Any, block: int, last: int) -> int:
    """Release a block; ``last``: the one freed before it to the queue's head, 0: none. Return the last one now."""
    blocks = cache.blocks
    blocks[block].references -= 1
    if blocks[block].references > 0:
        counts.num_repeated -= 1
        return last
    counts.num_free += 1
    if blocks[block].entry != NONE:
        link_after(blocks, blocks[0].before, block)
        return last
    link_after(blocks, last, block)
    return block


@kernel
def add_partial(  # noqa: PLR0917 - as few arrays as it needs
    cache: KeyedBlocks, counts: Any, block: int, tag: int, key: np.uint64, tokens: int
) -> None:
    """Cache ``block``, if it is not the null block, under the prefix of ``tokens`` that ends inside it."""
    if block == NONE:
        return
    known = cache.blocks[block]
    if known.entry != NONE and known.tokens < tokens and not _has_key(cache, block, tag, key):
        forget(cache, counts, block)
    if known.entry == NONE:
        known.tokens = tokens
    add_key(cache, counts, block, tag, key)


@kernel
def note_state(cache: KeyedBlocks, step: int, tag: int, key: np.uint64) -> None:
    """Note a key as cached in this step: no other request of it may read the state."""
    first = first_in_line(cache, tag, key)
    if first != NONE:
        cache.entries[first].step = step


@kernel
def release_range(pool: GroupPool, held: int, first: int, end: int) -> None:
    """Release a table's blocks from ``first`` to ``end``, leaf first; the null block takes their places."""
    last, places = 0, pool.places
    for place in range(end - 1, first - 1, -1):
        if places[held, place] != NONE:
            last = release_block(pool.cache, pool.counts[0], places[held, place], last)
            places[held, place] = NONE
