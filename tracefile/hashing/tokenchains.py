"""Chains at block size 1 out of chains of blocks and their branches: the one place where a trace's blocks are opened.

Two records' keys are equal up to a token exactly if their tokens are, as far as ``tracefile.hashing.branches`` knew
both. A block's keys are made of its hash, but for the tokens that it shares with the block it branches off from.
"""

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from tracefile.hashing.branches import own_branch, tail_key
from tracefile.hashing.splitmix64 import GOLDEN, mix64_array
from tracefile.records.arrays import UInt64Array
from tracefile.records.schema import BlockHash, Meta, Record


class Branches:
    """Blocks that begin as another one does, by their names."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._parents: dict[BlockHash, tuple[BlockHash, int]] = {}

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._parents

    def learn(self, record: Record) -> None:
        """Take in a record's branch; a later one of the same block comes of a forgotten chain and says nothing new."""
        branch = own_branch(record, self.block_size)
        if branch is not None and all(branch.own != block for block, _ in self.line(branch.block)):
            self._parents.setdefault(branch.own, (branch.block, branch.tokens))

    def parent(self, block: BlockHash) -> tuple[BlockHash, int] | None:
        """Return the block that ``block`` begins like, and for how many tokens; null: none."""
        return self._parents.get(block)

    def line(self, block: BlockHash) -> Iterator[tuple[BlockHash, int]]:
        """Yield the blocks that the first tokens of ``block`` are in: the nearest first, with their numbers."""
        tokens = self.block_size
        yield block, tokens
        while block in self._parents:
            block, shared = self._parents[block]
            tokens = min(tokens, shared)
            yield block, tokens


class TokenChains:
    """Turns records into records at block size 1, by the branches of the whole trace."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches

    def expand(self, record: Record) -> Record:
        """Return the record with a key for each token in place of each block's hash."""
        prompt = record.block_hashes
        if prompt is None:
            return record
        size = self.branches.block_size
        true = len(prompt) if record.hashable_blocks is None else record.hashable_blocks
        tokens = len(prompt) * size if record.prompt_tokens is None else record.prompt_tokens
        complete = true == len(prompt) == tokens // size
        output = record.output_block_hashes if complete else None
        chain = [*prompt[:true], *(output or ())]
        keys = self._keys(chain)
        if complete:
            computed = tokens if output is None else tokens + max((record.output_tokens or 0) - 1, 0)
            rest = min(max(computed - len(keys), 0), size - 1)
            keys += list(map(BlockHash, self.block_keys(tail_key(chain, record.request_id))[:rest].tolist()))
        return msgspec.structs.replace(
            record,
            block_hashes=keys[:tokens],
            output_block_hashes=None if output is None else keys[tokens:],
            hashable_blocks=None if complete else len(keys),
            branch_tokens=None,
            branch_hash=None,
        )

    def block_keys(self, block: BlockHash) -> UInt64Array:
        """Return the keys of a block's tokens, by its name."""
        keys = np.empty(self.branches.block_size, np.uint64)
        for name, tokens in self.branches.line(block):
            keys[:tokens] = _own_keys([name], self.branches.block_size)[0, :tokens]
        return keys

    def _keys(self, chain: list[BlockHash]) -> list[BlockHash]:
        keys = _own_keys(chain, self.branches.block_size)
        for at, block in enumerate(chain):
            if block in self.branches:
                keys[at] = self.block_keys(block)
        return list(map(BlockHash, keys.ravel().tolist()))


def _own_keys(blocks: list[BlockHash], block_size: int) -> UInt64Array:
    steps = np.arange(1, block_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return mix64_array(np.array(blocks, np.uint64)[:, None] + steps)


def branches_of(records: Iterable[Record], block_size: int) -> Branches:
    """Return the branches of all records of a trace."""
    branches = Branches(block_size)
    for record in records:
        branches.learn(record)
    return branches


def opened_meta(meta: Meta) -> Meta:
    """Return the header of a trace whose records are expanded."""
    known = None if meta.hash is None else msgspec.structs.replace(meta.hash, branches=None)
    return msgspec.structs.replace(meta, block_size=1, hash=known)
