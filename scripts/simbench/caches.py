"""The same traffic in blocks of two sizes through the pool, one request at a time, and the whole curve."""

from functools import partial
from pathlib import Path

import numpy as np

from measure.cache.hitcurve import hit_curve
from scripts.simbench.timing import Figures, measure
from sim.cache.onebyone import OneByOnePool, Requests, lay_out
from sim.workload.accesses import read_accesses
from sim.workload.chain import Chains
from tracefile import load_trace
from tracefile.records.batches import RecordBatch


def bench_caches(trace: Path, usable: int, runs: int) -> Figures:
    """From requests in memory: the pool at ``usable`` blocks, at the trace's block size and at a 32nd of it with 32
    times the blocks; then the whole curve."""
    coarse, size = read_batch(trace)
    figures: Figures = {}
    for batch, parts in ((coarse, 1), (finer(coarse, size, 32), 32)):
        name = f"block{size // parts}"
        figures |= measure(f"pool_{name}", runs, partial(pool_hits, batch, parts * usable))
        figures[f"pool_{name}_hit_blocks"] = pool_hits(batch, parts * usable)
        figures[f"pool_{name}_blocks"] = int(batch.requests["num_blocks"].sum())
    accesses = read_accesses(trace)
    return figures | measure("curve", runs, partial(hit_curve, accesses))


def read_batch(trace: Path) -> tuple[Requests, int]:
    """A trace's requests, and the tokens of its blocks."""
    meta, records = load_trace(trace)
    batch, chains = RecordBatch(records), Chains(meta)
    return lay_out(batch, batch.hashes(), chains), chains.block_size


def pool_hits(batch: Requests, usable: int) -> int:
    """Hit blocks of a whole trace."""
    return int(OneByOnePool(usable).run(batch.keys, batch.requests.copy()).sum())


def finer(batch: Requests, size: int, parts: int) -> Requests:
    """The same traffic in blocks of a ``parts``-th of ``size``: each hash stands for as many, made from it."""
    fine, requests = size // parts, batch.requests.copy()
    number = np.tile(np.arange(parts, dtype=np.uint64), len(batch.keys))
    keys = np.repeat(batch.keys, parts) * np.uint64(0x9E3779B97F4A7C15) + number * np.uint64(0xBF58476D1CE4E5B9)
    for name in ("known_keys", "first_key"):
        requests[name] *= parts
    requests["full_blocks"] = batch.computed_tokens // fine
    requests["num_blocks"] = -(-batch.computed_tokens // fine)
    requests["most_hits"] = np.minimum((batch.prompt_tokens - 1) // fine, requests["known_keys"])
    return batch._replace(keys=keys, requests=requests)
