"""Chains of hashes stored once: prompts share prefixes, so a chain is a prefix of an earlier one and what is new.

The new runs are the segments of a tree: each names the row whose run holds the block that it continues, and how many
blocks stand before it. Nothing is assumed of the hashes: what is no chain, such as ids that come again elsewhere, is
stored as it is.
"""

from array import array
from typing import NamedTuple

from tracefile.records.errors import InputError

Chain = list[int]


class CodedChain(NamedTuple):
    """Chain of one row."""

    prefix_row: int | None
    """The row, of the same group, that the chain begins like. None: it begins anew."""
    prefix_blocks: int
    """How many leading blocks it takes from there."""
    new: "array[int]"
    """The hashes after them, 64 bits each."""


class ChainEncoder:
    """Codes a group's chains in the order of its rows."""

    def __init__(self) -> None:
        self._chains: list[Chain] = []
        self._rows: dict[int, int] = {}
        """By hash: the row whose run holds it."""

    def encode(self, chain: Chain) -> CodedChain:
        """The next row's chain; raises OverflowError, and takes nothing in, if a hash is not of 64 bits."""
        blocks = self._known(chain)
        row = self._rows[chain[blocks - 1]] if blocks else None
        new = array("Q", chain[blocks:])
        here = len(self._chains)
        self._chains.append(chain)
        for known in chain[blocks:]:
            self._rows.setdefault(known, here)
        return CodedChain(row, blocks, new)

    def _known(self, chain: Chain) -> int:
        """Leading blocks that an earlier row has: where one is known, so are those before it."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self._rows:
                low = middle
            else:
                high = middle - 1
        if low and self._chains[self._rows[chain[low - 1]]][:low] == chain[:low]:
            return low
        return 0


class ChainDecoder:
    """Gives a group's chains back, row by row."""

    def __init__(self) -> None:
        self._chains: list[Chain] = []

    def decode(self, prefix_row: int, prefix_blocks: int, new: Chain) -> Chain:
        """The next row's chain, not to be changed; raises InputError if its prefix is not there."""
        if prefix_blocks:
            if not 0 <= prefix_row < len(self._chains) or not 0 < prefix_blocks <= len(self._chains[prefix_row]):
                raise InputError(
                    f"prefix_row: {prefix_row} for {prefix_blocks} blocks; expected an earlier row that has them"
                )
            new = self._chains[prefix_row][:prefix_blocks] + new
        self._chains.append(new)
        return new
