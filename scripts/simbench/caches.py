"""The same traffic in blocks of two sizes through the pool, one request at a time, and through a plain LRU."""

from functools import partial
from pathlib import Path

import numpy as np

from scripts.simbench.timing import Figures, measure
from sim.cache.curve import hit_curve
from sim.cache.objectlru import find_paths, object_hits
from sim.cache.segmentpool import Batch, SegmentPool, lay_out
from sim.workload.accesses import read_accesses
from sim.workload.chain import Chains
from tracefile import load_trace


def bench_caches(trace: Path, usable: int, runs: int) -> Figures:
    """From requests in memory: the pool at ``usable`` blocks, at the trace's block size and at a 32nd of it with 32
    times the blocks; a plain LRU likewise, with cutting the chains into spans and without; the whole curve."""
    meta, records = load_trace(trace)
    coarse, size = next(lay_out(records, Chains(meta))), meta.block_size or 16
    figures: Figures = {}
    for batch, parts in ((coarse, 1), (finer(coarse, size, 32), 32)):
        name, blocks = f"block{size // parts}", int(batch.requests["held"].sum())
        figures |= measure(f"pool_{name}", runs, partial(pool_hits, batch, parts * usable))
        figures[f"pool_{name}_hit_blocks"] = pool_hits(batch, parts * usable)
        figures[f"pool_{name}_blocks"] = blocks
        starts = np.append(0, np.cumsum(batch.requests["known"]))
        paths = find_paths(batch.keys, starts)
        figures |= measure(f"spans_{name}", runs, partial(find_paths, batch.keys, starts))
        figures |= measure(f"lru_{name}", runs, partial(object_hits, paths, parts * usable))
        figures[f"lru_{name}_blocks"] = len(batch.keys)
    accesses = read_accesses(trace)
    return figures | measure("curve", runs, partial(hit_curve, accesses))


def pool_hits(batch: Batch, usable: int) -> int:
    """Hit blocks of a whole trace."""
    return int(SegmentPool(usable).run(batch.keys, batch.requests.copy()).sum())


def finer(batch: Batch, size: int, parts: int) -> Batch:
    """The same traffic in blocks of a ``parts``-th of ``size``: each hash stands for as many, of its own making."""
    fine, requests = size // parts, batch.requests.copy()
    number = np.tile(np.arange(parts, dtype=np.uint64), len(batch.keys))
    keys = np.repeat(batch.keys, parts) * np.uint64(0x9E3779B97F4A7C15) + number * np.uint64(0xBF58476D1CE4E5B9)
    for name in ("known", "first_key"):
        requests[name] *= parts
    requests["full"] = batch.computed_tokens // fine
    requests["held"] = -(-batch.computed_tokens // fine)
    requests["most_hits"] = np.minimum((batch.prompt_tokens - 1) // fine, requests["known"])
    return batch._replace(keys=keys, requests=requests)
