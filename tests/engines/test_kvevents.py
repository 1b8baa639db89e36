"""Caches of engines by their events: vLLM's own bytes, older arrays, what cannot be named, gaps and restarts."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.kvevents import Change, EngineCache, EventFollower
from tracefile import BlockHasher, HashKey, InputError

KEY = HashKey(b"k" * 32)
# Batches as vLLM 0.32's KVEventBatch and its publisher's encoder write them, in blocks of 4 tokens.
STORED = bytes.fromhex(
    "93cb408f440000000000928ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb1706172656e745f626c"
    "6f636b5f68617368c0a9746f6b656e5f696473980001020304050607aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d65646975"
    "6da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b765f63616368655f73706563"
    "5f6b696e64ae66756c6c5f617474656e74696f6e89a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573910db170"
    "6172656e745f626c6f636b5f686173680ca9746f6b656e5f69647394cd012cce000111700102aa626c6f636b5f73697a6504a76c6f7261"
    "5f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f6964780000"
)  # 11 and 12 of tokens 0 to 7, then 13 of 300, 70000, 1, 2
REMOVED_CLEARED = bytes.fromhex(
    "93cb408f4800000000009284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573910da66d656469756da34750"
    "55a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)  # 13; then all
ADAPTER = bytes.fromhex(
    "93cb408f5000000000009189a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c42001010101010101010101"
    "01010101010101010101010101010101010101010101b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394050607"
    "08aa626c6f636b5f73697a6504a76c6f72615f696403a66d656469756da3475055a96c6f72615f6e616d65a761646170746572aa657874"
    "72615f6b6579739191a76164617074657200"
)  # of tokens 5 to 8, by the adapter "adapter", named in bytes


def hasher(lora: str | None = None, block_size: int = 2) -> BlockHasher:
    return BlockHasher(KEY, block_size=block_size, model=lora or "model", lora=lora)


def new_cache() -> EngineCache:
    return EngineCache(hasher)


def followed(batches: list[tuple[int, bytes]], follower: EventFollower) -> list[Change]:
    return [change for number, payload in batches for change in follower.take(number, payload, 1002.0)]


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1000.0, events, 0])


def stored(names: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
    found = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens}
    return {**found, "block_size": 4, **more}


def removed(*names: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names)}


def test_vllms_own_batches_become_our_hashes() -> None:
    follower = EventFollower(new_cache())
    chain = hasher().hash_blocks([*range(8), 300, 70000, 1, 2])
    assert followed([(0, STORED)], follower) == [Change(stored=[chain[1], chain[3]]), Change(stored=[chain[5]])]
    assert follower.lag_s == 1.5
    assert [block in follower.cache for block in chain] == [False, True, False, True, False, True]
    assert followed([(1, REMOVED_CLEARED)], follower) == [Change(removed=[chain[5]]), Change(cleared=True)]
    assert len(follower.cache) == 0
    (change,) = followed([(2, ADAPTER)], follower)
    assert change.stored == hasher("adapter").hash_blocks([5, 6, 7, 8])[1:]
    assert (follower.batches, follower.gaps, follower.faults, follower.cache.unplaced) == (3, 0, 0, 0)


def test_events_of_older_versions_are_arrays() -> None:
    cache, chain = new_cache(), hasher().hash_blocks(range(8))
    assert cache.apply(["BlockStored", [1, 2], None, list(range(8)), 4, None]).stored == [chain[1], chain[3]]
    assert cache.apply(["BlockRemoved", [2]]).removed == [chain[3]]
    assert cache.apply(["AllBlocksCleared"]).cleared
    assert cache.apply(["BlockPinned", 3]) == Change()


@pytest.mark.parametrize(
    ("event", "unplaced"),
    [
        (stored([1], [0] * 4, parent=99), 1),
        (stored([1, 2], [0] * 8, extra_keys=[None, ["salt"]]), 1),
        (stored([1], [0] * 3, block_size=3), 1),
        (stored([1], [0] * 4, medium="CPU"), 0),
        (stored([1], [0] * 4, group_idx=1), 0),
    ],
    ids=["unknown parent", "salted", "odd size", "offloaded", "other layers"],
)
def test_blocks_that_our_hashes_cannot_name_are_counted(event: dict[str, Any], unplaced: int) -> None:
    cache = new_cache()
    cache.apply(event)
    assert cache.unplaced == unplaced
    assert len(cache) == len(event["block_hashes"]) - 1


def test_a_block_stays_until_its_last_copy_goes() -> None:
    cache = new_cache()
    assert len(cache.apply(stored([1], [0] * 4)).stored) == 1
    assert cache.apply(stored([1], [0] * 4)) == Change(stored=[])
    assert cache.apply(removed(1)) == Change(removed=[])
    assert len(cache.apply(removed(1)).removed) == 1
    assert cache.apply(removed(1)) == Change(removed=[])


def test_a_block_by_two_names_stays_until_both_go() -> None:
    cache = new_cache()
    assert len(cache.apply(stored([1], [0] * 4)).stored) == 1
    assert cache.apply(stored([2], [0] * 4)) == Change(stored=[])
    assert cache.apply(removed(1, 1)) == Change(removed=[]), "its second removal is unknown"
    assert len(cache.apply(removed(2)).removed) == 1
    assert (cache._ends, cache._copies) == ({}, {})


def test_faults_are_counted_and_the_next_event_is_taken() -> None:
    follower = EventFollower(new_cache())
    followed([(0, b"\xc1"), (1, batch(stored([1], ["a"]), {}, 3, stored([2], [0] * 4)))], follower)  # type: ignore[list-item]
    assert (follower.faults, len(follower.cache)) == (2, 1)
    with pytest.raises(InputError, match=r"KV event BlockStored: .*token_ids"):
        new_cache().apply(stored([1], ["a"]))  # type: ignore[list-item]


BATCHES = [batch(stored([number], [number] * 4)) for number in range(6)]


def kept(first: int) -> Iterator[tuple[int, bytes]]:
    return iter([(number, BATCHES[number]) for number in range(2, 6) if number >= first])


@pytest.mark.parametrize(
    ("numbers", "replay", "held", "gaps"),
    [
        ([0, 1, 2], None, 3, 0),
        ([0, 3], None, 1, 1),
        ([1, 3], kept, 4, 0),  # 2 comes from the replay, and so do 4 and 5
        ([4], kept, 4, 0),  # late: what the engine kept
        ([0, 4], kept, 1, 1),  # 1 is not kept any more; of the replay nothing follows 0
        ([0, 1, 3, 4, 5], kept, 6, 0),  # live batches that the replay had
        ([3, 4, 0], None, 1, 0),  # a new engine
    ],
)
def test_gaps_are_replayed_or_clear_the_cache(numbers: list[int], replay: Any, held: int, gaps: int) -> None:
    follower = EventFollower(new_cache(), replay)
    followed([(number, BATCHES[number]) for number in numbers], follower)
    assert (len(follower.cache), follower.gaps) == (held, gaps)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_the_cache_is_the_multiset_of_blocks(steps: list[tuple[bool, int]]) -> None:
    """Names 0 and 3, 1 and 4, 2 and 5 are of the same tokens."""
    cache, counts = new_cache(), dict.fromkeys(range(6), 0)
    for comes, name in steps:
        cache.apply(stored([name], [name % 3] * 4) if comes else removed(name))
        counts[name] = counts[name] + 1 if comes else max(0, counts[name] - 1)
        held = [hasher().hash_blocks([block] * 4)[1] in cache for block in range(3)]
        assert held == [counts[block] + counts[block + 3] > 0 for block in range(3)]
