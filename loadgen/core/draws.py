"""Random draws as a function of position: equal draws on all machines, in Python and numpy, in any order.

A draw is ``mix64`` (the splitmix64 finaliser) over a seed and counters: any process can build request 41,207 without
the earlier requests. Draws become integers by multiply-shift, times whole microseconds: no float rounding decides.
"""

import hashlib
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from loadgen.core.vocabulary import Vocabulary
from tracefile.hashing.splitmix64 import GOLDEN, mix64, mix64_array

GENERATOR = "splitmix64/1"
"""Part of every workload digest: another generator draws other tokens from equal keys."""

_HALF = np.uint64(32)

PIECE = 1 << 14
"""Tokens drawn at once: two 64-bit numbers a token fit the cache of a core."""

TokenIds = npt.NDArray[np.uint32]


class Stream(IntEnum):
    """Purpose of a draw: arrivals, prefixes, prompt tokens … Streams are independent; values belong to a seed."""

    ARRIVAL_GAP = 1
    PREFIX_CHOICE = 2
    PREFIX_TOKENS = 3
    PROMPT_LENGTH = 4
    PROMPT_TOKENS = 5
    OUTPUT_LENGTH = 6
    THINK_TIME = 7
    REPLACEMENT_TOKENS = 8
    TURN_COUNT = 9
    STAGE_ORDER = 12


def draw(seed: int, stream: Stream, *counters: int) -> int:
    """64 random bits of a stream at these counters."""
    value = mix64(seed * GOLDEN + stream)
    for counter in counters:
        value = mix64(value + (counter + 1) * GOLDEN)
    return value


def draw_array(seed: int, stream: Stream, *counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``draw`` at every position of arrays that broadcast against each other."""
    value = np.full(1, mix64(seed * GOLDEN + stream), dtype=np.uint64)
    for counter in counters:
        value = mix64_array(value + (counter + np.uint64(1)) * np.uint64(GOLDEN))
    return value


def text_key(text: str) -> int:
    """64-bit key of a text, such as a nonce."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def below(bits: int, limit: int) -> int:
    """Integer of 0 … limit − 1 from a draw."""
    return (bits >> 32) * limit >> 32


def expand_tokens(keys: npt.NDArray[np.uint64], count: int, vocabulary: Vocabulary) -> npt.NDArray[np.uint32]:
    """Token ids, shape (len(keys), count); token j of key k depends on k and j alone."""
    low, span = vocabulary.low, vocabulary.high - vocabulary.low
    ids = np.empty((len(keys), count), dtype=np.uint32)
    # In pieces that fit the CPU cache.
    rows, columns = max(1, PIECE // max(1, count)), max(1, min(PIECE, count))
    for left in range(0, count, columns):
        counters = _counters(left, min(left + columns, count))
        for top in range(0, len(keys), rows):
            bits = mix64_array(keys[top : top + rows, np.newaxis] + counters)
            ids[top : top + rows, left : left + columns] = _into(low, span, bits)
    return ids


def _into(low: int, span: int, bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits >>= _HALF
    bits *= np.uint64(span)
    bits >>= _HALF
    bits += np.uint64(low)
    return bits


@lru_cache(maxsize=64)
def _counters(start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Numbers added to a key for its tokens ``start`` to ``stop`` − 1."""
    counters = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    counters.flags.writeable = False
    return counters


def tokens_of(key: int, count: int, vocabulary: Vocabulary) -> TokenIds:
    """``count`` token ids of one key; none if ``count`` ≤ 0."""
    ids: TokenIds = expand_tokens(np.array([key], dtype=np.uint64), max(0, count), vocabulary)[0]
    return ids
