"""Chained block hashes: they show which prompts share a prefix, and nothing else.

The hash of block i is H(previous ‖ the block's tokens as little-endian u32): 8 bytes read as a big-endian u64.
``previous`` is the hash of block i - 1; for block 0 it is H(key ‖ model ‖ LoRA ‖ keyed cache-salt), with lengths before
each field so that different fields never collide. Two requests have equal hashes up to block i if and only if their
tokens, model, adapter and salt are equal up to block i (collisions: 2⁻⁶⁴): then an engine can share their KV cache.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, cast

import xxhash

from tracefile.hashing.downsampling import downsample
from tracefile.hashing.hashkey import HashKey, key_path, keyed_id, load_key
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, HashAlgorithm, HashInfo

if TYPE_CHECKING:  # callers with arrays have numpy; the tap's data plane has none, which saves 20 MB
    import numpy as np
    import numpy.typing as npt

__all__ = ["BlockHasher", "HashKey", "downsample", "key_path", "keyed_id", "load_key"]

DEFAULT_BLOCK_SIZE = 16
TOKEN_BYTES = 4
HASH_BYTES = 8
CUT_BLOCKS = 256
MAX_TOKEN = 2**32 - 1
NO_FIELD = b"\xff\xff\xff\xff"
"""Length of an absent field, distinct from an empty field."""

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
Chain = Callable[[bytes, Iterable[bytes]], list[bytes]]
"""Returns the chained hashes of a list of blocks: a call per block would be slow."""


class BlockHasher:
    """Hashes the blocks of prompts of one model, LoRA adapter and cache salt; stateless between prompts.

    ``xxh3_64`` (fast, seeded with the key) is for traces that stay inside the company: it is not cryptographic.
    ``blake2b`` (keyed) is for traces that are shared.
    """

    def __init__(
        self,
        key: HashKey,
        algorithm: HashAlgorithm = "xxh3_64",
        block_size: int = DEFAULT_BLOCK_SIZE,
        *,
        model: str = "",
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        if block_size < 1:
            raise InputError(f"block size: {block_size}; expected 1 token or more")
        self.block_size = block_size
        self.info = HashInfo(algorithm=algorithm, key_id=key.key_id)
        self._chain_blocks = _chain_function(key, algorithm)
        salt = None if cache_salt is None else keyed_id(key, "cache_salt", cache_salt)
        names = _joined(key.secret, _encoded(model), _encoded(lora), _encoded(salt))
        (self.root,) = self._chain_blocks(b"", [names])
        """``previous`` of the first block of a prompt."""

    def hash_blocks(self, token_ids: TokenIds) -> list[BlockHash]:
        """Return the hashes of a prompt's full blocks; raises InputError if a token id is not a u32."""
        return self._chain(self.root, token_ids)

    def extend(self, previous: BlockHash | None, token_ids: TokenIds) -> list[BlockHash]:
        """Return the hashes of full blocks after the block with hash ``previous``; None: from the prompt's start."""
        root = self.root if previous is None else previous.to_bytes(HASH_BYTES, "big")
        return self._chain(root, token_ids)

    def _chain(self, previous: bytes, token_ids: TokenIds) -> list[BlockHash]:
        # Tokens are packed once and cut in C calls, so that hashing dominates the cost of a block.
        count = len(token_ids) // self.block_size
        size = self.block_size * TOKEN_BYTES
        packed = packed_tokens(token_ids)
        hashes = b"".join(self._chain_blocks(previous, cut_blocks(packed[: count * size], size)))
        return list(struct.unpack(f">{count}Q", hashes))


def cut_blocks(packed: bytes, size: int) -> Iterable[bytes]:
    """Cut packed tokens into blocks of ``size`` bytes, ``CUT_BLOCKS`` at a time to stay in the CPU cache."""
    if len(packed) <= CUT_BLOCKS * size:
        return struct.unpack(f"{size}s" * (len(packed) // size), packed)
    stride = CUT_BLOCKS * size
    parts = (packed[at : at + stride] for at in range(0, len(packed), stride))
    return chain.from_iterable(struct.Struct(f"{size}s" * (len(part) // size)).unpack(part) for part in parts)


def packed_tokens(token_ids: TokenIds) -> bytes:
    """Return token ids as little-endian u32; raises InputError if an id does not fit."""
    if hasattr(token_ids, "dtype"):
        return _packed_array(cast("npt.NDArray[np.integer]", token_ids))
    if isinstance(token_ids, array) and token_ids.typecode == "I" and sys.byteorder == "little":
        return token_ids.tobytes()
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InputError(f"token ids: {error}; expected integers of 0 … {MAX_TOKEN}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _packed_array(ids: "npt.NDArray[np.integer]") -> bytes:
    if ids.dtype != "uint32" and ids.size and not 0 <= ids.min() <= ids.max() <= MAX_TOKEN:
        raise InputError(f"token ids: an id outside 0 … {MAX_TOKEN}")
    return ids.astype("<u4", copy=False).tobytes()


def _chain_function(key: HashKey, algorithm: HashAlgorithm) -> Chain:
    if algorithm == "xxh3_64":
        return _xxh3_chain(int.from_bytes(key.derive(b"xxh3 seed", 8), "little"))
    if algorithm == "blake2b":
        return _blake2b_chain(key.secret)
    raise InputError(f"hash: {algorithm!r}; expected xxh3_64 or blake2b")


def _xxh3_chain(seed: int) -> Chain:
    def chain_blocks(previous: bytes, blocks: Iterable[bytes]) -> list[bytes]:
        digest, hashes = xxhash.xxh3_64_digest, []
        for block in blocks:
            previous = digest(previous + block, seed)
            hashes.append(previous)
        return hashes

    return chain_blocks


def _blake2b_chain(secret: bytes) -> Chain:
    # Copying a keyed state takes two thirds of the time of creating a state.
    keyed = hashlib.blake2b(key=secret, person=b"block hash", digest_size=HASH_BYTES)

    def chain_blocks(previous: bytes, blocks: Iterable[bytes]) -> list[bytes]:
        hashes = []
        for block in blocks:
            state = keyed.copy()
            state.update(previous + block)
            previous = state.digest()
            hashes.append(previous)
        return hashes

    return chain_blocks


def _encoded(field: str | None) -> bytes | None:
    return None if field is None else field.encode("utf-8", "surrogatepass")


def _joined(*fields: bytes | None) -> bytes:
    return b"".join(NO_FIELD if field is None else len(field).to_bytes(4, "little") + field for field in fields)
