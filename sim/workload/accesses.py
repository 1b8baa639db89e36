"""A trace's chains as flat arrays of block numbers, for the passes over all of them."""

from pathlib import Path

import numpy as np

from measure.cache.accesses import Accesses, KnownChains, lay_out_accesses
from measure.cache.chains import leading_places
from measure.cache.interning import Interner, join_chains, pack_chains
from sim.workload.arrivals import require_times, unread_prompts
from sim.workload.chain import engine_chains, hashed_batches, known_blocks
from tracefile.files.reading import open_trace


def read_accesses(trace: Path, block_size: int | None = None, *, needs_times: bool = False) -> Accesses:
    """Read a trace's chains by arrival, in file order if a time is missing.

    Raises InputError without hashes, or if ``needs_times`` and one is missing.
    """
    interner, packed, whole = Interner(), [], 0
    names = ("prompt_tokens", "prompt_logprobs", "known", "arrival_ms")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    with open_trace(trace) as reader:
        chains = engine_chains(reader.meta, block_size)
        for batch, batch_hashes in hashed_batches(reader):
            tokens = batch.numbers("prompt_tokens")
            rows = np.flatnonzero(tokens > 0)
            arrival_ms = batch.times("arrival_ms")[rows]
            if needs_times:
                ids = batch.words("request_id")
                require_times(reader.path, [ids[row] for row in rows.tolist()], arrival_ms)
            known = known_blocks(batch, batch_hashes, chains)[rows]
            keys = batch_hashes.values[leading_places(batch_hashes.starts[rows], known, chains.factor)]
            packed.append(pack_chains(interner.number(keys), known))
            filled = (tokens + np.maximum(batch.numbers("output_tokens") - 1, 0))[rows] // chains.block_size
            whole += int((known >= filled).sum())
            parts = (tokens[rows], unread_prompts(batch)[rows], known, arrival_ms)
            for column, part in zip(columns.values(), parts, strict=True):
                column.append(part)
    return lay_out_accesses(
        KnownChains(
            chains=join_chains(packed),
            numbers=interner.distinct,
            block_size=chains.block_size,
            fine_block_size=chains.fine_block_size,
            whole_chains=whole,
            **{name: np.concatenate(parts) for name, parts in columns.items()},
        )
    )
