"""The pool's literal state after each step, with the rule it follows from (docs/simulator.md)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.vllm.pool import BlockPool
from tests.sim.oracles.integrity import check_pool


def filled(pool: BlockPool, keys: list[int], blocks: int | None = None) -> list[int]:
    """Take blocks and cache the first ``len(keys)`` of them, as a prompt that hit nothing does."""
    taken = pool.take(len(keys) if blocks is None else blocks)
    pool.insert(taken[: len(keys)], keys)
    check_pool(pool)
    return taken


def test_block_zero_is_never_given_out() -> None:
    pool = BlockPool(5, 16)
    assert pool.num_free == 4  # rule 1: usable = num_gpu_blocks - 1
    assert pool.take(4) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="cannot take 1 blocks: 0 are free"):
        pool.take(1)


def test_a_request_is_freed_tail_first_and_unhashed_blocks_go_to_the_head() -> None:
    pool = BlockPool(8, 16)
    blocks = filled(pool, [10, 11, 12], blocks=4)
    assert blocks == [1, 2, 3, 4]
    pool.release(blocks)
    # Rule 3: block 4 has no hash and is reused first; 3, 2, 1 wait behind 5, 6, 7, the leaf before the root.
    assert pool.free_order() == [4, 5, 6, 7, 3, 2, 1]
    check_pool(pool, [])


def test_several_unhashed_blocks_keep_their_order_at_the_head() -> None:
    pool = BlockPool(6, 16)
    pool.release(pool.take(3))
    # Freed tail to head and prepended as one run: 3, 2, 1, and not each before the other.
    assert pool.free_order() == [3, 2, 1, 4, 5]


def test_without_prefix_caching_nothing_is_found_and_blocks_are_reused_at_once() -> None:
    pool = BlockPool(5, 16, enable_prefix_caching=False)
    blocks = filled(pool, [10, 11])
    assert pool.lookup([10, 11], 2) == []
    pool.release(blocks)
    assert pool.free_order() == [2, 1, 3, 4]


def test_a_hit_on_an_idle_block_leaves_the_queue_and_comes_back_last() -> None:
    pool = BlockPool(6, 16)
    pool.release(filled(pool, [10, 11]))
    pool.release(filled(pool, [20]))
    assert pool.free_order() == [4, 5, 2, 1, 3]
    hits = pool.lookup([10, 11, 12], 3)
    assert hits == [1, 2]
    assert pool.count_idle(hits) == 2  # rule 8 charges them: they are no longer free
    pool.hold(hits)
    assert pool.free_order() == [4, 5, 3]  # rule 4
    assert pool.count_idle(hits) == 0
    pool.hold(hits)
    pool.release(hits)
    assert pool.free_order() == [4, 5, 3]  # someone still holds them
    pool.release(hits)
    assert pool.free_order() == [4, 5, 3, 2, 1]
    check_pool(pool, [])


def test_lookup_stops_at_the_first_miss_and_at_its_limit() -> None:
    pool = BlockPool(6, 16)
    pool.release(filled(pool, [10, 11, 12]))
    assert pool.lookup([10, 99, 12], 3) == [1]
    assert pool.lookup([99, 11, 12], 3) == []
    assert pool.lookup([10, 11, 12], 2) == [1, 2]


def test_taking_a_hashed_block_evicts_it() -> None:
    pool = BlockPool(4, 16)
    pool.release(filled(pool, [10, 11, 12]))
    assert pool.take(1) == [3]  # the leaf goes first
    assert pool.evicted_blocks == 1
    assert pool.key_of(3) is None
    assert pool.lookup([10, 11, 12], 3) == [1, 2]


def test_duplicates_stand_in_line_in_insertion_order() -> None:
    pool = BlockPool(6, 16)
    first, second, third = ([filled(pool, [10])[0]] for _ in range(3))
    assert pool.lookup([10], 1) == first  # rule 7
    pool.release(second)
    pool.release(first)
    pool.release(third)
    assert pool.free_order() == [4, 5, 2, 1, 3]
    assert pool.take(3) == [4, 5, 2]  # the one in the middle of the line is evicted
    check_pool(pool)
    assert pool.lookup([10], 1) == [1]
    assert pool.take(1) == [1]  # the first is: the next in line takes over
    check_pool(pool)
    assert pool.lookup([10], 1) == [3]
    assert pool.take(1) == [3]
    assert pool.lookup([10], 1) == []
    assert pool.evicted_blocks == 3


def test_an_evicted_duplicate_that_comes_again_goes_to_the_end_of_the_line() -> None:
    pool = BlockPool(4, 16)
    first, second = filled(pool, [10]), filled(pool, [10])
    pool.release(first)
    pool.release(second)
    assert pool.take(2) == [3, 1]
    assert pool.lookup([10], 1) == second
    pool.insert([1], [10])
    assert pool.lookup([10], 1) == second


def test_reset_forgets_keys_and_keeps_the_order() -> None:
    pool = BlockPool(5, 16)
    blocks = filled(pool, [10, 11])
    assert not pool.reset_prefix_cache()  # a block is held
    assert pool.lookup([10, 11], 2) == [1, 2]
    pool.release(blocks)
    assert pool.reset_prefix_cache()
    assert pool.free_order() == [3, 4, 2, 1]
    assert pool.lookup([10, 11], 2) == []
    check_pool(pool, [])


def test_integrity_says_what_is_broken() -> None:
    pool = BlockPool(4, 16)
    pool.take(1)
    with pytest.raises(AssertionError, match="references are not the holders'"):
        check_pool(pool, [[2]])


@given(st.lists(st.lists(st.integers(0, 30), max_size=6, unique=True), max_size=40), st.sampled_from([7, 13]))
def test_a_leaf_never_outlives_its_root(prompts: list[list[int]], num_gpu_blocks: int) -> None:
    # Chains one at a time: whatever was evicted, what is cached of a chain stays a prefix of it.
    pool = BlockPool(num_gpu_blocks, 16)
    chains = [[hash(tuple(prompt[: i + 1])) for i in range(len(prompt))] for prompt in prompts]
    for chain in chains:
        hits = pool.lookup(chain, len(chain))
        pool.hold(hits)
        blocks = hits + pool.take(len(chain) - len(hits))
        pool.insert(blocks[len(hits) :], chain[len(hits) :])
        pool.release(blocks)
        check_pool(pool, [])
        assert pool.lookup(chain, len(chain)) == blocks
    for chain in chains:
        present = [bool(pool.lookup([key], 1)) for key in chain]
        assert all(root or not leaf for root, leaf in pairwise(present))


def test_holds_of_a_held_block_are_repeated() -> None:
    pool = BlockPool(8, 16)
    first = filled(pool, [10, 11, 12])
    assert pool.num_repeated == 0
    for _ in range(2):
        pool.hold(pool.lookup([10, 11, 99], 3))
    assert pool.num_repeated == 4  # two blocks, read by two requests more
    pool.release(first)
    assert pool.num_repeated == 2
    pool.release(first[:2])
    assert pool.num_repeated == 0
    pool.hold(pool.lookup([10, 11], 2))
    check_pool(pool, [first[:2], first[:2]])
    assert pool.num_repeated == 2
