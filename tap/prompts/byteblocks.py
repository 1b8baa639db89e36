"""Block hashes of prompts without a tokenizer."""

import hashlib
from collections.abc import Hashable

from tracefile.hashing.blockhash import BlockHasher
from tracefile.records.schema import BlockHash

MAX_BLOCKS = 1_000_000
MAX_LENGTHS = 16
"""Block lengths remembered after a block: unrelated prompts differ in them at the very start."""

_Node = Hashable
"""Hash of a block, or the start of a chain."""


class ByteBlocks:
    """Block hashes without a tokenizer: blocks of UTF-8 bytes, as many as the prompt has token blocks.

    Text seen first is cut evenly: block i ends at byte ``i · block_size · bytes / tokens``, rounded to half a block
    size. Boundaries, once cut, stay: a later prompt follows the known blocks as far as its bytes equal theirs, and only
    its remainder is cut anew. So equal prefixes have equal hashes whatever the lengths of the prompts; where sharing
    ends is true to the mean bytes per token only. The least recently followed blocks are forgotten, leaves first.
    """

    def __init__(self, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._quantum = max(1, block_size // 2)
        self._max_blocks = max_blocks
        self._lengths: dict[_Node, tuple[int, ...]] = {}
        """Lengths in bytes of the blocks known after a node, the latest first. Least recently used nodes first."""

    def hash_blocks(self, hasher: BlockHasher, start: Hashable, text: bytes, tokens: int) -> list[BlockHash]:
        """Return the ``tokens // block_size`` hashes, fewer if ``text`` has fewer bytes than tokens."""
        count = min(tokens, len(text)) // self._block_size
        chain, position = self._follow(hasher, start, text, count)
        boundaries = self._boundaries(len(text), tokens, position, len(chain), count)
        for end in boundaries:
            node: _Node = chain[-1] if chain else start
            self._remember(node, end - position)
            chain.append(self._hash(hasher, chain, text[position:end]))
            position = end
        self._touch([start, *chain])
        return chain

    def _follow(self, hasher: BlockHasher, start: _Node, text: bytes, count: int) -> tuple[list[BlockHash], int]:
        chain: list[BlockHash] = []
        position = 0
        while len(chain) < count:
            node = chain[-1] if chain else start
            for length in self._lengths.get(node, ()):
                if position + length > len(text):
                    continue
                found = self._hash(hasher, chain, text[position : position + length])
                if found in self._lengths:
                    chain.append(found)
                    position += length
                    break
            else:
                break
        return chain, position

    def _boundaries(self, size: int, tokens: int, position: int, done: int, count: int) -> list[int]:
        left_bytes, left_tokens = size - position, tokens - done * self._block_size
        ends = []
        previous = position
        for index in range(1, count - done + 1):
            exact = position + index * self._block_size * left_bytes // max(left_tokens, 1)
            rounded = position + (exact - position) // self._quantum * self._quantum
            end = rounded if previous < rounded <= size else min(previous + 1, size)
            if end <= previous:
                break
            ends.append(end)
            previous = end
        return ends

    def _hash(self, hasher: BlockHasher, chain: list[BlockHash], block: bytes) -> BlockHash:
        digest = hashlib.shake_128(block).digest(4 * self._block_size)
        ids = memoryview(digest).cast("I").tolist()
        return hasher.extend(chain[-1] if chain else None, ids)[0]

    def _remember(self, node: _Node, length: int) -> None:
        known = self._lengths.get(node, ())
        self._lengths[node] = (length, *(other for other in known if other != length))[:MAX_LENGTHS]

    def _touch(self, path: list[_Node]) -> None:
        """Make the path the latest used, its start last, so that a leaf is forgotten first."""
        for node in reversed(path):
            self._lengths[node] = self._lengths.pop(node, ())
        while len(self._lengths) > self._max_blocks:
            del self._lengths[next(iter(self._lengths))]

    def check_integrity(self) -> None:
        assert len(self._lengths) <= self._max_blocks
        for lengths in self._lengths.values():
            assert len(lengths) <= MAX_LENGTHS
            assert len(set(lengths)) == len(lengths)
            assert all(length > 0 for length in lengths)
