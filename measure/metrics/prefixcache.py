"""Prefix cache analysis of a trace: hits at every cache size."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from measure.cache.accesses import HashedChains, lay_out_accesses
from measure.cache.chains import Chains, count_hashed_blocks, leading_indices
from measure.cache.hitcurve import HitCurve, hit_curve
from measure.cache.interning import Interner, PackedChains, join_chains, pack_chains
from measure.metrics.results import CacheSize
from measure.runs import Run, engine_block
from tracefile.records.arrays import IntArray

KNEE_SHARE: Final = 0.95
"""Share of an unlimited cache's hits of a sufficient cache size."""


ROWS_AT_ONCE: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class CacheAnalysis:
    """Prefix hits of a trace at every cache size."""

    curve: HitCurve
    size: CacheSize


def analyse_cache(run: Run, chains: Chains, kv_bytes_per_token: int | None) -> CacheAnalysis:
    """Return prefix hits of a run at every cache size."""
    curve = hit_curve(lay_out_accesses(_hashed_chains(run, chains)))
    engine = run.meta.engine
    num_blocks = engine.num_gpu_blocks if engine is not None else None
    # One of vLLM's blocks is the null block.
    usable = num_blocks - 1 if num_blocks is not None and num_blocks > 1 else None
    return CacheAnalysis(curve, _cache_size(curve, usable, kv_bytes_per_token))


def _hashed_chains(run: Run, chains: Chains) -> HashedChains:
    rows = np.flatnonzero(run.prompt_tokens > 0)
    prompt_tokens, output_tokens = run.prompt_tokens[rows], np.maximum(run.output_tokens[rows], 0)
    blocks = (np.maximum(chains.prompts, 0)[rows], np.maximum(chains.true, 0)[rows], chains.outputs[rows])
    factor = engine_block(run.meta) // chains.block_size
    hashed_blocks = count_hashed_blocks(blocks, (prompt_tokens, output_tokens), chains.block_size, factor)
    filled = (prompt_tokens + np.maximum(output_tokens - 1, 0)) // (factor * chains.block_size)
    packed, count = _packed(chains, rows, hashed_blocks, factor)
    return HashedChains(
        chains=packed,
        numbers=count,
        hashed_blocks=hashed_blocks,
        prompt_tokens=prompt_tokens,
        prompt_logprobs=chains.unread[rows],
        arrival_ms=run.arrival_ms[rows],
        block_size=factor * chains.block_size,
        fine_block_size=chains.block_size,
        complete_chains=int((hashed_blocks >= filled).sum()),
    )


def _packed(chains: Chains, rows: IntArray, hashed_blocks: IntArray, factor: int) -> tuple[PackedChains, int]:
    """Return the packed block hashes of the requests at ``rows``, and the number of distinct blocks."""
    interner, parts = Interner(), []
    for first in range(0, max(len(rows), 1), ROWS_AT_ONCE):
        counts = hashed_blocks[first : first + ROWS_AT_ONCE]
        starts = chains.starts[rows[first : first + ROWS_AT_ONCE]]
        numbers = chains.numbers[leading_indices(starts, counts, factor)]
        if factor > 1:  # renumber, so that chains are runs of consecutive numbers again
            numbers = interner.number(numbers.astype(np.uint64))
        parts.append(pack_chains(numbers, counts))
    return join_chains(parts), interner.distinct if factor > 1 else len(chains.hashes)


def _cache_size(curve: HitCurve, usable: int | None, kv_bytes_per_token: int | None) -> CacheSize:
    """Return the sufficient cache size; ``usable``: KV cache blocks of the engine. Null: unknown."""
    size, most = curve.block_size, curve.max_hit_blocks
    knee = curve.size_for_share(KNEE_SHARE) if most else None
    return CacheSize(
        block_size=size,
        unlimited_rate=curve.rate_at(len(curve.sizes)),
        knee_share=KNEE_SHARE,
        knee_blocks=knee,
        knee_tokens=None if knee is None else knee * size,
        engine_blocks=usable,
        engine_tokens=None if usable is None else usable * size,
        engine_rate=None if usable is None else curve.rate_at(usable),
        engine_share=None if usable is None or not most else curve.hits_at(usable) / most,
        kv_bytes_per_token=kv_bytes_per_token,
    )
