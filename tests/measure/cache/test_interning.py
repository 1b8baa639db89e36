"""Numbers of hashes: as they first occur, through every growth of the table."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache.chains import chain_indices
from measure.cache.interning import Interner, join_chains, pack_chains

hashes = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 20), max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.lists(hashes, max_size=6))
def test_hashes_are_numbered_by_first_use(batches: list[list[int]]) -> None:
    interner, numbers = Interner(), dict[int, int]()
    for batch in batches:
        expected = [numbers.setdefault(item, len(numbers)) for item in batch]
        assert interner.number(np.array(batch, np.uint64)).tolist() == expected
    assert interner.distinct == len(numbers)
    assert interner.hashes.tolist() == list(numbers)


@given(st.lists(st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=4), min_size=1, max_size=3), st.data())
def test_packed_chains_come_back(parts: list[list[list[int]]], data: st.DataObject) -> None:
    packed = join_chains(
        [
            pack_chains(
                np.array([item for chain in part for item in chain], np.int32),
                np.array([len(chain) for chain in part], np.int64),
            )
            for part in parts
        ]
    )
    chains = [chain for part in parts for chain in part]
    which = data.draw(st.permutations(range(len(chains))))
    order = np.array(which, np.int64)
    runs = chain_indices((np.cumsum(packed.runs) - packed.runs)[order], packed.runs[order])
    blocks = chain_indices(packed.firsts[runs].astype(np.int64), packed.lengths[runs].astype(np.int64))
    assert blocks.tolist() == [item for position in which for item in chains[position]]
