"""vLLM's block pool with one request at a time: each looks up, takes, fills and frees its blocks before the next."""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import u8

from measure.cache.chains import chain_places, leading_places
from measure.cache.interning import leading
from measure.cache.vectors import integers
from sim.vllm.rules import blocks_for, lookup_limit
from sim.vllm.segments import FIELDS, SegmentPool, run_requests
from sim.workload.arrivals import unread_prompts
from sim.workload.chain import Chains, known_blocks
from tracefile.compiled import warn_if_plain
from tracefile.records.arrays import BoolArray, IntArray, UInt64Array
from tracefile.records.batches import Batch, Hashes
from tracefile.records.errors import InputError

Records = npt.NDArray[np.void]
UNLIMITED = 1 << 62
"""Blocks of a pool that never evicts."""
NO_KEYS, NO_ROWS = np.empty(0, np.uint64), np.empty(0, np.int64)
NOT_NOTED = vec[u8]()
MANY = 100_000
"""Requests of which the plain form takes seconds."""
REQUEST = np.dtype([(name, np.int64) for name in (*FIELDS, "prompt_logprobs")])
"""``FIELDS``, and 1 where log probabilities of the prompt were asked for, so that it is not looked up."""


class Requests(NamedTuple):
    """Requests laid out for the pool."""

    rows: IntArray
    prompt_tokens: IntArray
    computed_tokens: IntArray
    """All but the last output token, whose KV is never computed."""
    keys: UInt64Array
    requests: Records
    """``REQUEST`` of each; its keys are in ``keys``."""


class SequentialPool:
    """The pool between requests, of so many blocks; None: unlimited. Requests that alone do not fit it are left out."""

    def __init__(self, requests: Requests, usable_blocks: int | None) -> None:
        self.fits = fits = _that_fit(requests, usable_blocks)
        self.requests = requests.requests[fits]
        total = int(self.requests["num_blocks"].sum())
        usable = total if usable_blocks is None else min(total, usable_blocks)
        self._keys = integers(requests.keys)
        self._pool = SegmentPool(usable + 1)

    @property
    def evicted_blocks(self) -> int:
        return self._pool.evicted_blocks

    def run(self) -> IntArray:
        """Run the requests that fit; return the hit blocks of each. Raises InputError if keys are not chained."""
        return np.array(self._run(NOT_NOTED)[0], np.int64)

    def run_noting_evictions(self, num_keys: int) -> IntArray:
        """Run the requests that fit, whose keys are numbers below ``num_keys``. Raises InputError as ``run`` does.

        Return the three rows of ``run_requests``.
        """
        return np.array(self._run(vec[u8](bytes(max(num_keys, 1)))), np.int64)

    def _run(self, evicted: vec[u8]) -> list[list[int]]:
        if len(self.requests) > MANY:
            warn_if_plain()
        numbers = np.stack([self.requests[name] for name in FIELDS], axis=1)
        result = run_requests(self._pool, self._keys, integers(numbers.ravel()), evicted)
        if self._pool.not_chained:
            raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
        return result


def _that_fit(requests: Requests, usable_blocks: int | None) -> BoolArray:
    most = UNLIMITED if usable_blocks is None else usable_blocks
    return np.asarray(requests.requests["num_blocks"] <= most)


class BeladyPool:
    """A pool of the same size that knows the future: no pool hits more. It evicts what is looked up last, or never."""

    def __init__(self, requests: Requests, usable_blocks: int | None) -> None:
        self.fits = fits = _that_fit(requests, usable_blocks)
        self.requests = requests.requests[fits]
        self.evicted_blocks = 0
        self._uses = next_uses(requests.keys, self.requests).tolist()
        self._keys: list[int] = requests.keys.tolist()
        self._room = UNLIMITED if usable_blocks is None else usable_blocks
        self._cached: dict[int, int] = {}
        """By key, negative of a block that no other request has: its number by release, 0 while it is held."""
        self._line: list[tuple[int, int, int]] = []
        """A heap of idle blocks: worth of the next use, number by release, key. Some are outdated."""
        self._released = 0

    def run(self) -> IntArray:
        """Run the requests that fit; return the hit blocks of each."""
        names = ("first_key", "known_keys", "most_hits", "full_blocks", "num_blocks")
        rows = zip(*(self.requests[name].tolist() for name in names), strict=True)
        return np.array([self._serve(*row) for row in rows], np.int64)

    def _serve(self, first: int, known: int, most_hits: int, full: int, blocks: int) -> int:
        keys, uses = self._keys[first : first + known], self._uses[first : first + known]
        hits = next((depth for depth in range(most_hits) if keys[depth] not in self._cached), most_hits)
        self._cached.update(dict.fromkeys(keys[:hits], 0))
        while self._room - len(self._cached) < blocks - hits:
            _, number, key = heappop(self._line)
            if self._cached.get(key) == number:
                del self._cached[key]
                self.evicted_blocks += 1
        private = range(-self._released - full, -self._released - known)
        for key, worth in zip((*private, *keys[::-1]), (*[0] * len(private), *uses[::-1]), strict=True):
            self._released += 1  # the leaf before the root
            self._cached[key] = self._released
            heappush(self._line, (worth, self._released, key))
        return hits


_NO_REQUESTS = Requests(NO_ROWS, NO_ROWS, NO_ROWS, NO_KEYS, np.empty(0, REQUEST))


def read_requests(batches: Iterable[tuple[Batch, Hashes]], chains: Chains) -> Requests:
    """Return the requests of all batches, laid out as one."""
    parts = [lay_out(batch, hashes, chains) for batch, hashes in batches]
    whole = Requests(*map(np.concatenate, zip(_NO_REQUESTS, *parts, strict=True)))
    known = whole.requests["known_keys"]
    whole.requests["first_key"] = np.cumsum(known) - known
    return whole


def lay_out(batch: Batch, hashes: Hashes, chains: Chains) -> Requests:
    size, tokens = chains.block_size, batch.numbers("prompt_tokens")
    rows = np.flatnonzero(tokens > 0)
    prompt_tokens, known = tokens[rows], known_blocks(batch, hashes, chains)[rows]
    computed = prompt_tokens + np.maximum(batch.numbers("output_tokens")[rows] - 1, 0)
    requests = np.zeros(len(rows), REQUEST)
    requests["known_keys"], requests["first_key"] = known, np.cumsum(known) - known
    requests["prompt_blocks"] = np.minimum(prompt_tokens // size, known)
    requests["prompt_logprobs"] = unread = unread_prompts(batch)[rows]
    requests["most_hits"] = np.minimum(lookup_limit(prompt_tokens, size, unread), known)
    requests["full_blocks"], requests["num_blocks"] = computed // size, blocks_for(computed, size)
    keys = hashes.values[leading_places(hashes.starts[rows], known, chains.factor)]
    return Requests(rows, prompt_tokens, computed, keys, requests)


def next_uses(keys: UInt64Array, requests: Records) -> IntArray:
    """Worth of each key's next lookup by a later request: the sooner it comes, the more.

    0: no lookup comes, or the key is computed again before, which caches it anyway.
    """
    known, limits, last = requests["known_keys"], requests["most_hits"], len(requests)
    request_of = np.repeat(np.arange(last), known)
    numbers = np.unique(keys[chain_places(requests["first_key"], known)], return_inverse=True)[1]
    looked_up = leading(np.append(0, np.cumsum(known)), limits)
    order = np.argsort(numbers, kind="stable")
    same = np.append(numbers[order[1:]] == numbers[order[:-1]], False)[: len(order)]
    following = np.roll(order, -1)  # of the same key in the next request that has it
    uses = np.zeros(len(keys), np.int64)
    uses[chain_places(requests["first_key"], known)[order]] = np.where(
        same & looked_up[following], last - request_of[following], 0
    )
    return uses
