"""Token chains: hash chains at block size 1, from block hashes and branches.

The keys of two records are equal up to a token if and only if their tokens are, as far as the chains were in the memory
of ``tracefile.hashing.branches``. The token keys of a block derive from its hash; tokens shared with the block that it
branches from have the keys of that block.
"""

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from tracefile.hashing.branches import record_branch, tail_key
from tracefile.hashing.splitmix64 import GOLDEN, mix64_array
from tracefile.records.arrays import UInt64Array
from tracefile.records.schema import BlockHash, Meta, Record


class Branches:
    """Branches of a trace: by block, the earlier block with the same first tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._parents: dict[BlockHash, tuple[BlockHash, int]] = {}

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._parents

    def learn(self, record: Record) -> None:
        """Add the branch of a record; a second branch of a block comes from an evicted chain and is ignored."""
        branch = record_branch(record, self.block_size)
        if branch is not None and all(branch.block != block for block, _ in self.ancestors(branch.earlier)):
            self._parents.setdefault(branch.block, (branch.earlier, branch.tokens))

    def parent(self, block: BlockHash) -> tuple[BlockHash, int] | None:
        """Return the block that ``block`` branches from, and the number of shared tokens; None: no branch."""
        return self._parents.get(block)

    def ancestors(self, block: BlockHash) -> Iterator[tuple[BlockHash, int]]:
        """Yield ``block`` and the blocks it branches from, nearest first, each with the number of shared tokens."""
        tokens = self.block_size
        yield block, tokens
        while block in self._parents:
            block, shared = self._parents[block]
            tokens = min(tokens, shared)
            yield block, tokens


class TokenChains:
    """Expands records to block size 1 with the branches of the complete trace."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches

    def expand(self, record: Record) -> Record:
        """Return the record with a key per token instead of block hashes."""
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
            partial_tokens = min(max(computed - len(keys), 0), size - 1)
            keys += list(map(BlockHash, self.block_keys(tail_key(chain, record.request_id))[:partial_tokens].tolist()))
        return msgspec.structs.replace(
            record,
            block_hashes=keys[:tokens],
            output_block_hashes=None if output is None else keys[tokens:],
            hashable_blocks=None if complete else len(keys),
            branch_tokens=None,
            branch_hash=None,
        )

    def block_keys(self, block: BlockHash) -> UInt64Array:
        """Return the token keys of a block."""
        keys = np.empty(self.branches.block_size, np.uint64)
        for name, tokens in self.branches.ancestors(block):
            keys[:tokens] = _token_keys([name], self.branches.block_size)[0, :tokens]
        return keys

    def _keys(self, chain: list[BlockHash]) -> list[BlockHash]:
        keys = _token_keys(chain, self.branches.block_size)
        for at, block in enumerate(chain):
            if block in self.branches:
                keys[at] = self.block_keys(block)
        return list(map(BlockHash, keys.ravel().tolist()))


def _token_keys(blocks: list[BlockHash], block_size: int) -> UInt64Array:
    steps = np.arange(1, block_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return mix64_array(np.array(blocks, np.uint64)[:, None] + steps)


def branches_of(records: Iterable[Record], block_size: int) -> Branches:
    """Return the branches of all records of a trace."""
    branches = Branches(block_size)
    for record in records:
        branches.learn(record)
    return branches


def token_meta(meta: Meta) -> Meta:
    """Return the header of a trace that is expanded to block size 1."""
    hash_info = None if meta.hash is None else msgspec.structs.replace(meta.hash, branches=None)
    return msgspec.structs.replace(meta, block_size=1, hash=hash_info)
