"""Blocks of bytes in place of tokens: as many as the engine counts, shared as far as the bytes are equal."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tap.prompts.byteblocks import ByteBlocks
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import BlockHash

HASHER = BlockHasher(HashKey(bytes(32)), block_size=4)


def blocks(max_blocks: int = 1000) -> ByteBlocks:
    return ByteBlocks(4, max_blocks)


def test_a_later_prompt_keeps_the_boundaries_of_what_it_shares_whatever_its_own_density() -> None:
    known = blocks()
    first = known.hash_blocks(HASHER, "m", b"a" * 160, 40)
    dense = known.hash_blocks(HASHER, "m", b"a" * 160 + b"b" * 40, 80)
    assert dense[:10] == first
    assert len(dense) == 20
    known.check_integrity()


def test_memory_is_bounded_and_the_leaves_of_the_least_recent_prompt_go_first() -> None:
    known = blocks(max_blocks=30)
    first = known.hash_blocks(HASHER, "m", b"a" * 400, 40)
    for letter in (b"b", b"c"):
        known.hash_blocks(HASHER, "m", letter * 400, 40)
        known.check_integrity()
    assert known.hash_blocks(HASHER, "m", b"a" * 400, 40) == first, "cut anew, by the same numbers"
    known.check_integrity()


class WatchedBlocks(ByteBlocks):
    """Remembers which bytes, from the prompt's start on, each hash was made of."""

    def __init__(self) -> None:
        super().__init__(4)
        self.prefixes: dict[BlockHash, bytes] = {}

    def _hash(self, hasher: BlockHasher, chain: list[BlockHash], block: bytes) -> BlockHash:
        made = super()._hash(hasher, chain, block)
        prefix = (self.prefixes[chain[-1]] if chain else b"") + block
        assert self.prefixes.setdefault(made, prefix) == prefix, "a hash stands for one prefix only"
        return made


PROMPTS = st.lists(st.tuples(st.text("ab", min_size=1, max_size=200), st.integers(1, 120)), min_size=1, max_size=12)


@settings(deadline=None)
@given(PROMPTS)
def test_a_hash_stands_for_the_bytes_up_to_its_blocks_end(prompts: list[tuple[str, int]]) -> None:
    known = WatchedBlocks()
    for text, tokens in prompts:
        data = text.encode()
        chain = known.hash_blocks(HASHER, "m", data, tokens)
        assert len(chain) <= min(tokens, len(data)) // 4
        prefixes = [known.prefixes[block] for block in chain]
        assert all(data.startswith(prefix) for prefix in prefixes)
        assert all(len(shorter) < len(longer) for shorter, longer in pairwise(prefixes))
        assert known.hash_blocks(HASHER, "m", data, tokens) == chain, "the same prompt again is the same chain"
        known.check_integrity()
