"""The block pool with one request at a time, compiled, at the cost of a chain's branches rather than of its blocks."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.kernels import segments as kernels
from sim.kernels.segments import SegmentCache
from sim.vllm.config import FreeRule
from sim.workload.chain import Chains, tokens_computed
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

FIRST_ROOM = 1 << 12
"""Copies of segments that there is room for at first; it doubles when it is full."""

BATCH = 1 << 14
"""Requests that are laid out at once."""

Keys = npt.NDArray[np.uint64]


class Batch(NamedTuple):
    """Requests laid out for the kernels."""

    prompt_tokens: IntArray
    computed_tokens: IntArray
    """At its end; the last output token's KV never is."""
    keys: Keys
    requests: npt.NDArray[np.void]
    """``kernels.REQUEST``, each with its place in ``keys``."""


class SegmentPool:
    """The pool between requests. What it has run needs no memory but for what is cached of it."""

    def __init__(self, usable: int | None, free_rule: FreeRule = "vllm") -> None:
        self._keys: Keys = np.empty(0, np.uint64)
        cache = np.zeros(1, kernels.CACHE)
        # An endless cache has blocks that nothing known was ever in for as long as anyone asks.
        cache["usable"] = cache["num_unhashed"] = 1 << 62 if usable is None else usable
        cache["append_all"] = free_rule == "append_all"
        cache["free_segment"] = cache["free_copy"] = -1
        cache["num_copies"] = kernels.FIRST_COPY
        copies = np.zeros(FIRST_ROOM, kernels.COPY)
        copies["before"][: kernels.FIRST_COPY] = copies["after"][: kernels.FIRST_COPY] = range(kernels.FIRST_COPY)
        segments, table = np.zeros(FIRST_ROOM, kernels.SEGMENT), np.zeros(4 * FIRST_ROOM, np.int32)
        self._cache = SegmentCache(cache, segments, copies, table)

    @property
    def evicted_blocks(self) -> int:
        """Blocks that lost what they cached to another request."""
        return int(self._cache.cache["evicted_blocks"][0])

    def run(self, keys: Keys, requests: npt.NDArray[np.void]) -> IntArray:
        """Hit blocks of each of ``requests``, which fit the pool; see ``Batch``.

        Raises InputError where it notices that the keys are not chained: each must have the same ones before it
        wherever it occurs.
        """
        if len(self._keys):
            arena = np.empty(len(self._keys) + len(keys), np.uint64)
            moved = kernels.move_keys(self._cache, self._keys, arena)
            arena[moved : moved + len(keys)] = keys
            keys, requests = arena[: moved + len(keys)], requests.copy()
            requests["first_key"] += moved
        done = 0
        while done < len(requests):
            done = kernels.run_requests(self._cache, keys, requests, done)
            if done == kernels.NOT_CHAINED:
                raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
            if done < len(requests):
                self._grow()
        self._keys = keys
        return requests["hits"]

    def _grow(self) -> None:
        """Twice the room."""
        cache, segments, copies, table = self._cache
        segments, copies = (np.concatenate([part, np.zeros_like(part)]) for part in (segments, copies))
        self._cache = SegmentCache(cache, segments, copies, np.zeros(2 * len(table), np.int32))
        kernels.enter_all(self._cache)


def lay_out(records: Iterable[Record], chains: Chains) -> Iterator[Batch]:
    """Records with a prompt length, some at a time."""
    records = iter(records)
    while some := list(islice(records, BATCH)):
        yield _batch(some, chains)


def _batch(records: list[Record], chains: Chains) -> Batch:
    prompt_tokens = np.array([record.prompt_tokens for record in records], np.int64)
    computed = np.array([tokens_computed(record) for record in records], np.int64)
    keys, ends = array("Q"), []
    for record in records:
        keys.extend(chains.known(record))
        ends.append(len(keys))
    requests = np.zeros(len(records), kernels.REQUEST)
    requests["known"] = np.diff(ends, prepend=0)
    requests["first_key"] = np.asarray(ends) - requests["known"]
    requests["full"] = computed // chains.block_size
    requests["held"] = -(-computed // chains.block_size)
    requests["most_hits"] = np.minimum((prompt_tokens - 1) // chains.block_size, requests["known"])
    return Batch(prompt_tokens, computed, np.frombuffer(keys, np.uint64) if keys else np.empty(0, np.uint64), requests)
