"""Branches: the points within a block at which chains part, so that what two prompts share is known to the token.

Hashes of full blocks tell it to the block, and a cache of single tokens (SGLang's page 1, llama.cpp) hits the rest
too. A hash a token would be 16 times the size, and would let the key's holder guess a prompt token by token. So tokens
of recent chains are kept in memory, and a record notes where its own chain leaves them: a block of an earlier chain,
and the number of tokens up to there. No hash is of fewer tokens than a block.
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
"""Tokens of recent chains in memory: 16 MB, and some 30 MB for their hashes."""


class Branch(NamedTuple):
    """Point at which a chain leaves all earlier ones."""

    tokens: int
    """Leading tokens that it shares, those within the block included."""
    block: BlockHash
    """The earlier chain's block in which they part: its hash, or the ``tail_key`` of a chain that ends in it."""


class OwnBranch(NamedTuple):
    """A record's branch."""

    own: BlockHash
    """Its block in which the chains part, named as ``Branch.block``."""
    block: BlockHash
    tokens: int
    """Tokens of the block that both have."""


def tail_key(chain: Sequence[BlockHash], request_id: RequestId) -> BlockHash:
    """Name of the block that a chain's last tokens leave partly filled; it is no hash of them."""
    last = chain[-1] if chain else 0
    return BlockHash(xxhash.xxh3_64_intdigest(last.to_bytes(HASH_BYTES, "big") + request_id.encode()))


def own_branch(record: Record, block_size: int) -> OwnBranch | None:
    """Return the record's branch; null: none is noted."""
    if record.branch_tokens is None or record.branch_hash is None:
        return None
    chain = record.chain()
    block, tokens = divmod(record.branch_tokens, block_size)
    own = chain[block] if block < len(chain) else tail_key(chain, record.request_id)
    return OwnBranch(own, record.branch_hash, tokens)


@dataclass(slots=True)
class _Kept:
    """A chain's own part, behind the blocks of its parent."""

    parent: int | None
    first: int
    hashes: Sequence[BlockHash]
    packed: bytes
    """Its tokens from block ``first`` on, to its end."""
    tail: BlockHash
    forks: list[tuple[BlockHash, bytes]]


class BranchFinder:
    """Chains by their tokens; the least recently continued are forgotten, and what branches off them is not found."""

    def __init__(self, block_size: int, max_tokens: int = MAX_TOKENS) -> None:
        self._bytes = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._held = 0
        self._next = 0
        self._chains: OrderedDict[int, _Kept] = OrderedDict()
        """Least recently continued first, and a parent always after its children."""
        self._owners: dict[BlockHash, int] = {}
        """By block: the chain that had it first."""
        self._forks: dict[tuple[BlockHash, bytes], BlockHash] = {}
        """By a block and the tokens after it, fewer than a block: the block that first began with them."""

    def add(
        self, root: bytes, chain: Sequence[BlockHash], prompt: TokenIds, output: TokenIds, request_id: RequestId
    ) -> Branch | None:
        """Return the branch of a new chain, of all ids in ``prompt`` and ``output``; null: it parts at a block's end.

        ``root`` is what its first block's hash began from.
        """
        known = self._known(chain)
        start = known * self._block_size
        packed = packed_tokens(prompt[start:]) + packed_tokens(output[max(start - len(prompt), 0) :])
        before = chain[known - 1] if known else BlockHash(int.from_bytes(root, "big"))
        parent = self._owners.get(before) if known else None
        tail = tail_key(chain, request_id)
        size, block = self._longest(before, parent, known, packed[: self._bytes - TOKEN_BYTES])
        self._keep(_Kept(parent, known, list(chain[known:]), packed, tail, []), before)
        return Branch(start + size // TOKEN_BYTES, block) if size else None

    def check_integrity(self) -> None:
        assert self._held == sum(len(kept.packed) for kept in self._chains.values()) <= self._max_bytes
        assert sum(len(kept.hashes) for kept in self._chains.values()) == len(self._owners)
        assert sum(len(kept.forks) for kept in self._chains.values()) == len(self._forks)
        places = {number: place for place, number in enumerate(self._chains)}
        for number, kept in self._chains.items():
            assert kept.parent is None or places[kept.parent] > places[number]

    def _known(self, chain: Sequence[BlockHash]) -> int:
        """Leading blocks that are known: where one is, so are those before it."""
        return bisect_left(chain, True, key=lambda block: block not in self._owners)

    def _longest(self, before: BlockHash, parent: int | None, at: int, packed: bytes) -> tuple[int, BlockHash]:
        """Return the bytes that a known chain has after ``before``, too, and its block there."""
        size, block = 0, BlockHash(0)
        if parent is not None:
            kept = self._chains[parent]
            start = (at - kept.first) * self._bytes
            size = _common(packed, kept.packed[start : start + self._bytes])
            block = kept.hashes[at - kept.first] if at - kept.first < len(kept.hashes) else kept.tail
        low, high = size // TOKEN_BYTES, len(packed) // TOKEN_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            fork = self._forks.get((before, packed[: middle * TOKEN_BYTES]))
            if fork is not None:
                low, size, block = middle, middle * TOKEN_BYTES, fork
            else:
                high = middle - 1
        return size, block

    def _keep(self, kept: _Kept, before: BlockHash) -> None:
        if kept.packed:
            number = self._next = self._next + 1
            own = kept.hashes[0] if kept.hashes else kept.tail
            for end in range(TOKEN_BYTES, min(len(kept.packed), self._bytes - TOKEN_BYTES) + 1, TOKEN_BYTES):
                fork = (before, kept.packed[:end])
                if fork not in self._forks:
                    self._forks[fork] = own
                    kept.forks.append(fork)
            self._owners.update(dict.fromkeys(kept.hashes, number))
            self._chains[number] = kept
            self._held += len(kept.packed)
        above = kept.parent
        while above is not None:  # each after its children
            self._chains.move_to_end(above)
            above = self._chains[above].parent
        while self._held > self._max_bytes:
            self._forget(self._chains.popitem(last=False)[1])

    def _forget(self, kept: _Kept) -> None:
        self._held -= len(kept.packed)
        for fork in kept.forks:
            del self._forks[fork]
        for known in kept.hashes:
            del self._owners[known]


def _common(one: bytes, other: bytes) -> int:
    """Length of the common beginning, in whole tokens."""
    longest = min(len(one), len(other))
    return next((at for at in range(0, longest, 4) if one[at : at + 4] != other[at : at + 4]), longest)
