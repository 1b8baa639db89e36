"""Hashes to tokens: golden values, and what is shared is shared and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.vocabulary import ORDINARY, Vocabulary
from replay.expansion import Expansion
from tracefile import BlockHash, RequestId

WARM = Expansion(4, "golden", ORDINARY)
COLD = Expansion(4, "golden", ORDINARY, cold=True)
A, B = RequestId("a"), RequestId("b")
HASHES = st.lists(st.integers(0, (1 << 64) - 1).map(BlockHash), max_size=8)


def test_blocks_are_these_on_every_machine() -> None:
    hashes = [BlockHash(0), BlockHash(1), BlockHash(0xFEDCBA9876543210)]
    assert WARM.blocks(hashes, A).tolist() == [
        [46390, 74699, 54752, 6494],
        [10672, 33154, 16856, 67094],
        [19150, 46300, 89975, 2865],
    ]
    assert COLD.blocks(hashes, A).tolist() == [
        [92958, 7055, 37229, 71400],
        [52582, 34352, 70680, 33860],
        [71145, 94220, 41966, 52739],
    ]
    assert WARM.tail(3, A).tolist() == [26572, 83928, 68113]
    assert WARM.rekeyed(BlockHash(7), A) == 7128335734089859259


@given(HASHES)
def test_a_hash_is_the_same_block_in_every_warm_request_and_in_no_two_cold_ones(hashes: list[BlockHash]) -> None:
    assert WARM.blocks(hashes, A).tolist() == WARM.blocks(hashes, B).tolist()
    assert WARM.blocks(hashes, A).shape == (len(hashes), 4)
    for row_a, row_b in zip(COLD.blocks(hashes, A).tolist(), COLD.blocks(hashes, B).tolist(), strict=True):
        assert row_a != row_b


def test_another_nonce_is_another_prompt() -> None:
    hashes = [BlockHash(value) for value in range(50)]
    mine = {tuple(row) for row in WARM.blocks(hashes, A).tolist()}
    others = {tuple(row) for row in Expansion(4, "other", ORDINARY).blocks(hashes, A).tolist()}
    assert len(mine) == len(others) == 50
    assert not mine & others


def test_tails_are_their_requests_own() -> None:
    assert WARM.tail(15, A).tolist() != WARM.tail(15, B).tolist()
    assert WARM.tail(0, A).tolist() == []


def test_only_ordinary_vocabulary() -> None:
    narrow = Expansion(512, "n", Vocabulary(1000, 1003))
    assert set(narrow.blocks([BlockHash(5)], A).ravel().tolist()) == {1000, 1001, 1002}
