"""Numbers of hashes: as they first occur, through every growth of the table."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache.interning import Interner, NumberedChains, lay_out_numbers

hashes = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 20), max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.lists(hashes, max_size=6))
def test_hashes_are_numbered_as_they_first_occur(batches: list[list[int]]) -> None:
    interner, numbers = Interner(), dict[int, int]()
    for batch in batches:
        expected = [numbers.setdefault(one, len(numbers)) for one in batch]
        assert interner.number(np.array(batch, np.uint64)).tolist() == expected
    assert interner.distinct == len(numbers)
    assert interner.hashes.tolist() == list(numbers)


def test_chains_in_larger_blocks_are_every_so_many_th_number() -> None:
    # Two chains of five and four numbers; in blocks of two numbers, two are known of each, and one is private.
    chains = NumberedChains(np.array([0, 1, 2, 3, 4, 0, 1, 5, 6], np.int32), np.array([0, 5]), 7, every=2)
    found = lay_out_numbers(chains, np.array([2, 2]), np.array([3, 2]), np.array([0, 4]), 6)
    assert found.keys.tolist() == [1, 3, 7, -1, 1, 6]
    assert found.distinct == 8
