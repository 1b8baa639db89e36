"""The compiled pool by segments against the plain pool block by block: the same hits and evictions."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.workload.chain import Chains
from tests.sim.oracles.sequential import compiled_hits, plain_hits
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

BLOCK = 4


@st.composite
def traffic(draw: st.DrawFn) -> list[Record]:
    """Chains that branch anywhere, prompts that end with a full block (cached twice by rule 6), unknown outputs."""
    records: list[Record] = []
    fresh = itertools.count(1)
    for number in range(draw(st.integers(1, 25))):
        prompt = draw(st.integers(1, 10)) * BLOCK + [0, 0, 1, 3][draw(st.integers(0, 3))]
        output = draw(st.integers(0, 20))
        full = (prompt + max(output - 1, 0)) // BLOCK
        chain: list[BlockHash] = []
        if bool(records) and draw(st.integers(0, 1)):
            earlier = records[draw(st.integers(0, len(records) - 1))]
            complete = [*(earlier.block_hashes or ()), *(earlier.output_block_hashes or ())]
            chain = [*complete[: draw(st.integers(0, len(complete)))]]
        chain = chain[:full]
        chain += [BlockHash(next(fresh)) for _ in range(full - len(chain))]
        records.append(
            Record(
                request_id=RequestId(f"r{number}"),
                prompt_tokens=prompt,
                output_tokens=output,
                block_hashes=chain[: prompt // BLOCK],
                output_block_hashes=chain[prompt // BLOCK :] if draw(st.integers(0, 1)) else None,
                hashable_blocks=2 if draw(st.integers(0, 3)) == 3 else None,
            )
        )
    return records


@settings(max_examples=120, deadline=None)
@given(traffic(), st.integers(2, 60))
def test_segments_equal_blocks(records: list[Record], usable: int) -> None:
    result = compiled_hits(records, Chains(Meta(block_size=BLOCK)), usable)
    assert result == plain_hits(records, Chains(Meta(block_size=BLOCK)), usable)


@settings(max_examples=40, deadline=None)
@given(traffic())
def test_an_unlimited_cache_evicts_nothing(records: list[Record]) -> None:
    result = compiled_hits(records, Chains(Meta(block_size=BLOCK)), None)
    roomy = plain_hits(records, Chains(Meta(block_size=BLOCK)), 10_000)
    assert (result.hit_blocks, result.evicted_blocks, result.usable_blocks) == (roomy.hit_blocks, 0, None)


def test_unchained_ids_are_rejected() -> None:
    records = [
        Record(request_id=RequestId("r"), prompt_tokens=9, output_tokens=1, block_hashes=chain)
        for chain in ([BlockHash(1), BlockHash(2)], [BlockHash(1), BlockHash(3)], [BlockHash(2), BlockHash(4)])
    ]
    with pytest.raises(InputError, match="occurs at two depths"):
        compiled_hits(records, Chains(Meta(block_size=BLOCK)), 10)
