"""Branches: points within a block at which hash chains diverge, so that shared prefixes are known to the token.

Block hashes show a shared prefix to the block only, but a cache of single tokens (SGLang with page size 1, llama.cpp)
also hits the tokens after it. A hash per token would take 16 times the space, and would let the key's owner guess a
prompt token by token. So the tokens of recent chains are in memory, and a record has its branch: the block of an
earlier chain in which the two diverge, and the number of shared tokens. No hash covers less than a block.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from tracefile.hashing.blockhash import HASH_BYTES, TOKEN_BYTES, TokenIds, packed_tokens
from tracefile.records.schema import BlockHash, Record, RequestId

MAX_TOKENS = 4 << 20
"""Maximum tokens of recent chains in memory: 16 MB, and about 30 MB for their hashes."""


class Branch(NamedTuple):
    """Point at which a hash chain diverges from all earlier chains."""

    tokens: int
    """Length of the shared prefix in tokens."""
    block: BlockHash
    """Block of the earlier chain in which the chains diverge: its hash, or ``tail_key`` for a partial last block."""


class RecordBranch(NamedTuple):
    """Branch of a record."""

    block: BlockHash
    """Block of the record in which the chains diverge: a hash or a ``tail_key``."""
    earlier: BlockHash
    """``Branch.block``."""
    tokens: int
    """Shared tokens of the two blocks."""


def tail_key(chain: Sequence[BlockHash], request_id: RequestId) -> BlockHash:
    """Return an identifier of a chain's partial last block; it is no hash of the tokens."""
    last = chain[-1] if chain else 0
    return BlockHash(xxhash.xxh3_64_intdigest(last.to_bytes(HASH_BYTES, "big") + request_id.encode()))


def record_branch(record: Record, block_size: int) -> RecordBranch | None:
    """Return the branch of a record; None: the record has none."""
    if record.branch_tokens is None or record.branch_hash is None:
        return None
    chain = record.chain()
    block, tokens = divmod(record.branch_tokens, block_size)
    diverging = chain[block] if block < len(chain) else tail_key(chain, record.request_id)
    return RecordBranch(diverging, record.branch_hash, tokens)


@dataclass(slots=True)
class _StoredChain:
    """The part of a chain after the blocks of its parent chain."""

    parent: int | None
    first: int
    hashes: Sequence[BlockHash]
    packed: bytes
    """Packed tokens from block ``first`` to the end."""
    tail: BlockHash
    forks: list[tuple[BlockHash, bytes]]


class BranchFinder:
    """Finds the branch of each new chain among recent chains; the least recently extended chains are evicted."""

    def __init__(self, block_size: int, max_tokens: int = MAX_TOKENS) -> None:
        self._bytes = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._stored_bytes = 0
        self._next = 0
        self._chains: OrderedDict[int, _StoredChain] = OrderedDict()
        """Least recently extended first; a parent always after its children."""
        self._owners: dict[BlockHash, int] = {}
        """First chain that contains a block, by block."""
        self._forks: dict[tuple[BlockHash, bytes], BlockHash] = {}
        """First block that begins with the tokens after a block, by that block and these tokens (less than a block)."""

    def add(
        self, root: bytes, chain: Sequence[BlockHash], prompt: TokenIds, output: TokenIds, request_id: RequestId
    ) -> Branch | None:
        """Add a chain of token ids ``prompt`` and ``output``; return its branch, None: it diverges at a block's end.

        ``root``: ``BlockHasher.root`` of the chain.
        """
        shared = self._shared_blocks(chain)
        start = shared * self._block_size
        packed = packed_tokens(prompt[start:]) + packed_tokens(output[max(start - len(prompt), 0) :])
        before = chain[shared - 1] if shared else BlockHash(int.from_bytes(root, "big"))
        parent = self._owners.get(before) if shared else None
        tail = tail_key(chain, request_id)
        size, block = self._longest(before, parent, shared, packed[: self._bytes - TOKEN_BYTES])
        self._insert(_StoredChain(parent, shared, list(chain[shared:]), packed, tail, []), before)
        return Branch(start + size // TOKEN_BYTES, block) if size else None

    def check_integrity(self) -> None:
        assert self._stored_bytes == sum(len(stored.packed) for stored in self._chains.values()) <= self._max_bytes
        assert sum(len(stored.hashes) for stored in self._chains.values()) == len(self._owners)
        assert sum(len(stored.forks) for stored in self._chains.values()) == len(self._forks)
        order = {number: index for index, number in enumerate(self._chains)}
        for number, stored in self._chains.items():
            assert stored.parent is None or order[stored.parent] > order[number]

    def _shared_blocks(self, chain: Sequence[BlockHash]) -> int:
        """Count the leading blocks of earlier chains; if a block is stored, so are all blocks before it."""
        return bisect_left(chain, True, key=lambda block: block not in self._owners)

    def _longest(self, before: BlockHash, parent: int | None, at: int, packed: bytes) -> tuple[int, BlockHash]:
        """Return the longest prefix of ``packed`` that a stored chain has after ``before``, in bytes, and its block."""
        size, block = 0, BlockHash(0)
        if parent is not None:
            stored = self._chains[parent]
            start = (at - stored.first) * self._bytes
            size = _common(packed, stored.packed[start : start + self._bytes])
            block = stored.hashes[at - stored.first] if at - stored.first < len(stored.hashes) else stored.tail
        low, high = size // TOKEN_BYTES, len(packed) // TOKEN_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            fork = self._forks.get((before, packed[: middle * TOKEN_BYTES]))
            if fork is not None:
                low, size, block = middle, middle * TOKEN_BYTES, fork
            else:
                high = middle - 1
        return size, block

    def _insert(self, stored: _StoredChain, before: BlockHash) -> None:
        if stored.packed:
            number = self._next = self._next + 1
            first_block = stored.hashes[0] if stored.hashes else stored.tail
            for end in range(TOKEN_BYTES, min(len(stored.packed), self._bytes - TOKEN_BYTES) + 1, TOKEN_BYTES):
                fork = (before, stored.packed[:end])
                if fork not in self._forks:
                    self._forks[fork] = first_block
                    stored.forks.append(fork)
            self._owners.update(dict.fromkeys(stored.hashes, number))
            self._chains[number] = stored
            self._stored_bytes += len(stored.packed)
        ancestor = stored.parent
        while ancestor is not None:  # each after its children
            self._chains.move_to_end(ancestor)
            ancestor = self._chains[ancestor].parent
        while self._stored_bytes > self._max_bytes:
            self._evict(self._chains.popitem(last=False)[1])

    def _evict(self, stored: _StoredChain) -> None:
        self._stored_bytes -= len(stored.packed)
        for fork in stored.forks:
            del self._forks[fork]
        for block in stored.hashes:
            del self._owners[block]


def _common(left: bytes, right: bytes) -> int:
    """Return the length of the common prefix in bytes, in complete tokens."""
    longest = min(len(left), len(right))
    return next((at for at in range(0, longest, 4) if left[at : at + 4] != right[at : at + 4]), longest)
