"""Hits at every size of a trace too large to hold: exact for small caches, estimated from a sample beyond them.

Chained hashes make this simple: a touch of a block touches all before it, and these after it, so along a prompt
depths only grow. A leading block hits in a cache of S blocks if and only if its own depth is at most S, and blocks can
be sampled one by one, by hash (SHARDS: Waldspurger et al., 2015): a sampled block that lies s deep among sampled blocks
lies about (s − 1) / R + 1 deep among all.

A few blocks with most of the hits would ruin a sample: each counts fully or not at all. Those are never deep. So the
order of the ``exact_blocks`` touched last is kept whole, and what hits within it is counted, not estimated.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from measure.cache.stackdepth import RecencyStack, depth_of, empty_stack, mixed, touch, with_room
from measure.machinecode.entries import entry
from measure.table import table_lines
from sim.cache.pool import block_size_text, gib_cell, gib_heading, unknown_outputs
from sim.vllm.rules import lookup_limit
from sim.workload.chain import Chains
from tracefile.hashing.splitmix64 import mix64
from tracefile.records.arrays import FloatArray, IntArray, UInt64Array
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

GROUPS = 16
"""Into which the sample is cut at random, to see how much it varies."""
T_95 = 2.131
"""Student's t for 95 % and 15 degrees of freedom."""
BATCH = 1 << 12
MOST_EXACT = 1 << 24
"""Of which each takes some 50 bytes."""
SIZES = 200
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of a sample."""

    rate: float
    exact_blocks: int = 1 << 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise InputError(f"--sample: {self.rate:g}; expected a share of blocks above 0 and up to 1")
        if not 1 <= self.exact_blocks <= MOST_EXACT:
            raise InputError(f"--exact-blocks: {self.exact_blocks}; expected 1 to {MOST_EXACT}")


@dataclass(frozen=True, slots=True)
class SampledCurve:
    """Hits by cache size with 95 % intervals. Arrays of one length."""

    sizes: IntArray
    """In blocks, evenly on a log axis."""
    hit_blocks: FloatArray
    low: FloatArray
    high: FloatArray
    block_size: int
    lookup_blocks: int
    input_tokens: int
    sampled_blocks: int
    sampling: Sampling
    fine_block_size: int
    """The trace's."""
    requests: int
    whole_chains: int
    """Requests whose filled blocks are all known."""


@dataclass(slots=True)
class Counts:
    """Counts of a pass over the trace."""

    exact: IntArray
    """Hits by depth, up to ``exact_blocks``."""
    sampled: IntArray
    """By group and depth among sampled blocks: hits of sampled blocks that lie deeper than ``exact_blocks``."""
    lookup_blocks: int = 0
    input_tokens: int = 0
    sampled_blocks: int = 0
    requests: int = 0
    whole_chains: int = 0


class Orders(NamedTuple):
    """Arguments of a pass."""

    exact: RecencyStack
    sample: RecencyStack
    threshold: np.uint64
    """The largest hash that is in the sample."""
    salt: np.uint64
    exact_hits: IntArray
    sampled_hits: IntArray


def sample_curve(
    records: Iterable[Record], chains: Chains, sampling: Sampling, also: Sequence[int] = ()
) -> SampledCurve:
    """Return the curve from one pass. Memory follows ``exact_blocks`` and the sample; ``also``: sizes to add."""
    counts = count_sampled(records, chains, sampling)
    deepest = max(int(counts.sampled_blocks / sampling.rate), sampling.exact_blocks, 1)
    sizes = np.unique([*np.geomspace(1, deepest, SIZES).astype(np.int64), *also])
    estimate, error = hits_at(counts, sampling, sizes)
    # How many of d blocks are sampled varies too: the sizes themselves are only known so well.
    blur = 2 * np.sqrt((1 - sampling.rate) / (sizes * sampling.rate))
    low = hits_at(counts, sampling, sizes * np.maximum(1 - blur, 0))[0] - T_95 * error
    high = hits_at(counts, sampling, sizes * (1 + blur))[0] + T_95 * error
    # Up to exact_blocks nothing is estimated, and no larger cache hits less.
    exact = sizes <= sampling.exact_blocks
    known = float(counts.exact.sum())
    return SampledCurve(
        sizes,
        np.minimum(estimate, counts.lookup_blocks),
        np.where(exact, estimate, np.maximum(low, known)),
        np.where(exact, estimate, np.minimum(high, counts.lookup_blocks)),
        chains.block_size,
        counts.lookup_blocks,
        counts.input_tokens,
        counts.sampled_blocks,
        sampling,
        chains.fine_block_size,
        counts.requests,
        counts.whole_chains,
    )


def hits_at(counts: Counts, sampling: Sampling, sizes: IntArray | FloatArray) -> tuple[FloatArray, FloatArray]:
    """Estimated hits in caches of ``sizes`` blocks, and the standard errors of the sampled part."""
    whole = np.minimum(sizes, sampling.exact_blocks).astype(np.int64)
    exact = np.cumsum(counts.exact)[whole]
    # Of depth s among the sampled: (s − 1) / rate + 1 <= size.
    deepest = np.floor((sizes - 1) * sampling.rate + 1 + 1e-9).astype(np.int64)
    deepest = np.where(sizes > sampling.exact_blocks, np.clip(deepest, 0, counts.sampled.shape[1] - 1), 0)
    by_group = np.cumsum(counts.sampled, axis=1)[:, deepest]
    variance = GROUPS * by_group.var(axis=0, ddof=1) * (1 - sampling.rate)
    return exact + by_group.sum(axis=0) / sampling.rate, np.sqrt(variance) / sampling.rate


def count_sampled(records: Iterable[Record], chains: Chains, sampling: Sampling) -> Counts:
    counts = Counts(np.zeros(sampling.exact_blocks + 1, np.int64), np.zeros((GROUPS, 2), np.int64))
    exact, sample = empty_stack(2 * sampling.exact_blocks), empty_stack()
    # At rate 1 the threshold must let the largest hash through too.
    threshold = np.uint64(min(int(sampling.rate * 2**64), _WORD))
    salt = np.uint64(mix64(sampling.seed + 1))
    for keys, starts, limits, tokens, whole in _batches(records, chains):
        counts.requests += len(limits)
        counts.whole_chains += whole
        counts.lookup_blocks += int((tokens // chains.block_size).sum())
        counts.input_tokens += int(tokens.sum())
        done = 0
        while done < len(limits):
            needed = int(starts[done + 1] - starts[done])
            exact = _roomy(exact, needed, sampling.exact_blocks)
            sample = _roomy(sample, needed, None)
            if counts.sampled.shape[1] <= sample.state[1]:
                wider = np.zeros((GROUPS, int(sample.state[1]) + 1), np.int64)
                wider[:, : counts.sampled.shape[1]] = counts.sampled
                counts.sampled = wider
            orders = Orders(exact, sample, threshold, salt, counts.exact, counts.sampled)
            done = _run(orders, keys, starts, limits, done)
    counts.sampled_blocks = int(sample.state[2])
    return counts


def _roomy(stack: RecencyStack, touches: int, most: int | None) -> RecencyStack:
    return stack if stack.state[0] + touches <= stack.state[1] else with_room(stack, touches, most)


def _batches(
    records: Iterable[Record], chains: Chains
) -> Iterator[tuple[UInt64Array, IntArray, IntArray, IntArray, int]]:
    """Yield chains' keys, where each begins, how many may hit, the prompts' tokens; the number of whole chains."""
    records = iter(records)
    while some := list(islice(records, BATCH)):
        keys, starts, whole = array("Q"), [0], 0
        for record in some:
            prompt, known = (record.prompt_tokens or 0) // chains.block_size, chains.known(record)
            whole += len(known) >= chains.full_blocks(record)
            chain = known if len(known) >= prompt else known + chains.private(prompt - len(known))
            keys.extend([key & _WORD for key in chain])
            starts.append(len(keys))
        tokens = np.array([record.prompt_tokens or 0 for record in some], np.int64)
        unread = np.array([bool(record.prompt_logprobs) for record in some], np.int64)
        limits = lookup_limit(tokens, chains.block_size, unread)
        found = np.frombuffer(keys, np.uint64) if keys else np.empty(0, np.uint64)
        yield found, np.array(starts, np.int64), limits, tokens, whole


@entry
def _run(
    orders: Orders, keys: UInt64Array, starts: IntArray, limits: IntArray, first: int
) -> int:  # pragma: no cover - compiled
    """Run requests from ``first`` on for as long as both orders have room; the first that was not run."""
    exact, sample, threshold, salt = orders.exact, orders.sample, orders.threshold, orders.salt
    exact_hits, sampled_hits = orders.exact_hits, orders.sampled_hits
    deepest = len(exact_hits) - 1
    for request in range(first, len(limits)):
        begin, end = starts[request], starts[request + 1]
        if max(exact.state[0] - exact.state[1], sample.state[0] - sample.state[1]) + end - begin > 0:
            return request
        for place in range(begin, min(end, begin + limits[request])):
            depth = depth_of(exact, keys[place])
            if 0 < depth <= deepest:
                exact_hits[depth] += 1
                continue
            drawn = mixed(keys[place] ^ salt)
            if drawn <= threshold:
                depth = depth_of(sample, keys[place])
                if depth > 0:
                    sampled_hits[np.int64(drawn & np.uint64(15)), depth] += 1
        for place in range(end - 1, begin - 1, -1):
            touch(exact, keys[place])
            if mixed(keys[place] ^ salt) <= threshold:
                touch(sample, keys[place])
    return len(limits)


def sampled_as_json(curve: SampledCurve) -> dict[str, Any]:
    return {
        "block_size": curve.block_size,
        "lookup_blocks": curve.lookup_blocks,
        "input_tokens": curve.input_tokens,
        "requests": curve.requests,
        "whole_chains": curve.whole_chains,
        "sizes": curve.sizes.tolist(),
        "hit_blocks": curve.hit_blocks.tolist(),
        "hit_tokens": (curve.hit_blocks * curve.block_size).tolist(),
        "hit_tokens_low": (curve.low * curve.block_size).tolist(),
        "hit_tokens_high": (curve.high * curve.block_size).tolist(),
        "sample": {**asdict(curve.sampling), "blocks": curve.sampled_blocks},
        "use": [],
    }


def describe_sampled(curve: SampledCurve, shown: Sequence[int], kv_bytes: int | None = None) -> str:
    sampling, blocks = curve.sampling, block_size_text(curve.block_size, curve.fine_block_size)
    lines = [
        f"{curve.lookup_blocks:,} full prompt blocks of {blocks}; exact up to {sampling.exact_blocks:,} blocks, beyond "
        f"from {curve.sampled_blocks:,} blocks sampled at {sampling.rate:g}",
        *unknown_outputs(curve.requests, curve.whole_chains),
    ]
    rows = []
    places = np.searchsorted(curve.sizes, shown) if shown else np.arange(len(curve.sizes) - 1, -1, -10)[::-1]
    for place in places:
        rates = [
            hits[place] * curve.block_size / max(curve.input_tokens, 1)
            for hits in (curve.hit_blocks, curve.low, curve.high)
        ]
        size = int(curve.sizes[place])
        span = "exact" if size <= sampling.exact_blocks else f"{rates[1]:.2%} … {rates[2]:.2%}"
        tokens = size * curve.block_size
        rows.append([f"{size:,}", f"{tokens:,}", *gib_cell(tokens, kv_bytes), f"{rates[0]:.2%}", span])
    headings = ["usable blocks", "cache tokens", *gib_heading(kv_bytes), "% of input", "95 % interval"]
    return "\n".join(lines + table_lines(headings, rows))
