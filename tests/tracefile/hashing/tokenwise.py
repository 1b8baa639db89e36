"""Records of a whole trace at block size 1."""

from collections.abc import Sequence

from tracefile.hashing.tokenchains import TokenChains, branches_of
from tracefile.records.schema import Record


def tokenwise(records: Sequence[Record], block_size: int) -> list[Record]:
    return list(map(TokenChains(branches_of(records, block_size)).expand, records))
