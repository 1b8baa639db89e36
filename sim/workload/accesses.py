"""A trace's chains as flat arrays of block numbers, for the passes over all of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from measure.cache.accesses import Accesses, KnownChains, lay_out_accesses
from measure.cache.interning import Interner, join_chains, pack_chains
from sim.workload.arrivals import require_times
from sim.workload.chain import engine_chains, hashed_batches
from sim.workload.prompts import join_prompts, lay_out
from tracefile.files.reading import open_trace


def read_accesses(trace: Path, block_size: int | None = None, *, needs_times: bool = False) -> Accesses:
    """Read a trace's chains by arrival, in file order if a time is missing.

    Raises InputError without hashes, or if ``needs_times`` and one is missing.
    """
    interner, packed, parts = Interner(), [], []
    with open_trace(trace) as reader:
        chains = engine_chains(reader.meta, block_size)
        for batch, hashes in hashed_batches(reader):
            part = lay_out(batch, hashes, chains)
            if needs_times:
                prompted = np.flatnonzero(batch.numbers("prompt_tokens") > 0)
                ids = batch.column("request_id")
                require_times(reader.path, [ids[row] for row in prompted.tolist()], part.arrival_ms)
            packed.append(pack_chains(interner.number(part.keys), part.known))
            parts.append(replace(part, keys=part.keys[:0]))
    prompts = join_prompts(parts)
    return lay_out_accesses(
        KnownChains(
            chains=join_chains(packed),
            numbers=interner.distinct,
            known=prompts.known,
            prompt_tokens=prompts.prompt_tokens,
            prompt_logprobs=prompts.unread,
            arrival_ms=prompts.arrival_ms,
            block_size=chains.block_size,
            fine_block_size=chains.fine_block_size,
            whole_chains=int((prompts.known >= prompts.full_blocks).sum()),
        )
    )
