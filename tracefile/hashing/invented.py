"""Block hashes of conversations that no tokens are known of: equal exactly where two are said to share a prefix."""

from tracefile.hashing.splitmix64 import MASK64, mix64
from tracefile.records.schema import BlockHash

COMMON = 0
"""Number of the chain of a prefix that all conversations share."""


def invented_blocks(conversation: int, first: int, end: int, shared: int = 0) -> list[BlockHash]:
    """Hashes of blocks ``first`` to ``end`` exclusive of a conversation (1 or more), the first ``shared`` common."""
    return [
        BlockHash(mix64((mix64(COMMON if place < shared else conversation) + place) & MASK64))
        for place in range(first, end)
    ]
