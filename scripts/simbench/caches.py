"""A trace through the pool, one request at a time, and the whole curve."""

from functools import partial
from pathlib import Path

from measure.cache.hitcurve import hit_curve
from scripts.simbench.timing import Figures, measure
from sim.cache.sequential_pool import Requests, SequentialPool, lay_out
from sim.workload.accesses import read_accesses
from sim.workload.chain import Chains
from tracefile import load_trace
from tracefile.records.batches import RecordBatch


def bench_caches(trace: Path, usable: int, runs: int) -> Figures:
    """From requests in memory: the pool at ``usable`` blocks, one request at a time; then the whole curve."""
    batch, accesses = read_batch(trace), read_accesses(trace)
    figures = measure("pool", runs, partial(pool_hits, batch, usable))
    figures["pool_hit_blocks"] = pool_hits(batch, usable)
    figures["pool_blocks"] = int(batch.requests["num_blocks"].sum())
    return figures | measure("curve", runs, partial(hit_curve, accesses))


def read_batch(trace: Path) -> Requests:
    """A trace's requests."""
    meta, records = load_trace(trace)
    batch = RecordBatch(records)
    return lay_out(batch, batch.hashes(), Chains(meta))


def pool_hits(batch: Requests, usable: int) -> int:
    """Hit blocks of a whole trace."""
    return int(SequentialPool(batch, usable, 512).run().sum())
