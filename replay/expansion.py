"""Expansion of block hashes to tokens: a block's tokens are a pure function of its hash and the run's nonce.

A block hash covers its complete prefix, so prompts that shared a prefix in the capture share one in the replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.core.draws import TokenIds, expand_tokens, text_key, tokens_of
from loadgen.core.vocabulary import Vocabulary
from tracefile.hashing.splitmix64 import mix64, mix64_array
from tracefile.records.schema import BlockHash, RequestId

TAIL = 0x7461696C
"""Separates the key of a prompt's tail from the keys of its blocks."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Generates ``block_size`` tokens for each block hash, under one nonce."""

    block_size: int
    nonce: str
    vocabulary: Vocabulary
    cold: bool = False
    """True if a block hash gets different tokens in every request."""

    def blocks(self, hashes: Sequence[BlockHash], request_id: RequestId) -> npt.NDArray[np.uint32]:
        salt = self.request_key(request_id) if self.cold else text_key(self.nonce)
        keys = mix64_array(np.array(hashes, dtype=np.uint64) ^ np.uint64(salt))
        return expand_tokens(keys, self.block_size, self.vocabulary)

    def tail(self, count: int, request_id: RequestId) -> TokenIds:
        return tokens_of(mix64(self.request_key(request_id) ^ TAIL), count, self.vocabulary)

    def request_key(self, request_id: RequestId) -> int:
        return text_key(f"{self.nonce}\0{request_id}")

    def rekeyed(self, block_hash: BlockHash, request_id: RequestId) -> BlockHash:
        """Hash that only this request has, for a block that no other request shares."""
        return BlockHash(mix64(block_hash ^ self.request_key(request_id)))

    def renamed(self, block_hash: BlockHash) -> BlockHash:
        """Hash that only this nonce has, for a block shared within the run."""
        return BlockHash(mix64(block_hash ^ text_key(self.nonce)))
