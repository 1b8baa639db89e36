"""Block keys of a record as the engine sees them: one for every block that gets full, prompt then output.

A recorded hash is its own key. A block of unknown content (an output without token ids, a prompt beyond
``hashable_blocks``) gets a private key: it takes room and is evicted like any other block, and nothing hits it.
"""

import sys
from collections.abc import Iterator

import numpy as np

from measure.cache.chains import known_blocks as count_known
from measure.cache.chains import leading_places
from measure.number_format import rests_on
from tracefile import outputs
from tracefile.files.reading import TraceReader, open_trace
from tracefile.hashing import tokenchains
from tracefile.hashing.downsampling import downsample
from tracefile.outputs import InferredOutputs
from tracefile.records import batches
from tracefile.records.arrays import IntArray, UInt64Array
from tracefile.records.batches import Batch, Hashes
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

UNKNOWN = -1
FAR_MS = 60_000.0
"""Further behind a request that ended later, one is out of order: files have requests in the order of their ends."""
FIRST_PRIVATE = -(2**63) - 1
"""Private keys go down from here: below every 64-bit hash, signed ones of other tools included."""


class Chains:
    """Turns records of one trace into chains at ``block_size``, an engine's; None: the trace's own.

    Raises InputError, naming both sizes, unless the engine's is a multiple of the trace's. A trace without hashes
    gives only private chains, and then needs ``block_size``.
    """

    def __init__(self, meta: Meta, block_size: int | None = None) -> None:
        fine = meta.block_size
        if fine is None and block_size is None:
            raise InputError("meta.block_size: the trace has no block hashes; expected a trace with them")
        self.block_size = block_size or fine or 0
        self.fine_block_size = fine or self.block_size
        if self.block_size % self.fine_block_size:
            raise InputError(
                f"block size {self.block_size}: not a multiple of the trace's {self.fine_block_size}; "
                f"expected --block-size {self.fine_block_size}, {2 * self.fine_block_size}, …"
            )
        self.factor = self.block_size // self.fine_block_size
        self._next_private = FIRST_PRIVATE

    def begun(self, record: Record) -> list[int]:
        """Keys of all blocks at the end, a last one that is not full included: known ones, then private ones."""
        known, first = self.known(record), self._next_private
        self._next_private -= -(-tokens_computed(record) // self.block_size) - len(known)
        return [*known, *range(first, self._next_private, -1)]

    def known(self, record: Record) -> list[int]:
        """Keys of full blocks that the trace has."""
        known, output = self._known(record)
        if output and len(known) == (record.prompt_tokens or 0) // self.block_size:
            known = known + output
        return known[: tokens_computed(record) // self.block_size]

    def _known(self, record: Record) -> tuple[list[int], list[int]]:
        """Known keys of the prompt and of the output, at the engine's size."""
        if self.factor > 1:
            record = downsample(record, self.fine_block_size, self.factor)
        prompt: list[int] = list(record.block_hashes or ())
        output: list[int] = list(record.output_block_hashes or ())
        true = record.hashable_blocks
        return (prompt, output) if true is None or true >= len(prompt) else (prompt[:true], [])


def engine_chains(meta: Meta, block_size: int | None) -> Chains:
    """Chains at ``block_size``, else at the engine's if the trace's divides it, else at the trace's."""
    reported, fine = (0 if meta.engine is None else meta.engine.block_size or 0), meta.block_size or 1
    return Chains(meta, block_size or (reported if reported % fine == 0 else 0) or None)


def tokens_computed(record: Record) -> int:
    """Tokens of ``record`` whose KV is computed: all but the last one generated."""
    return (record.prompt_tokens or 0) + max((record.output_tokens or 0) - 1, 0)


def hashed_records(reader: TraceReader, inferred: InferredOutputs | None = None) -> Iterator[Record]:
    """Yield records with a known prompt length; at the end, print warnings. Raises InputError if none had hashes.

    Outputs of unknown ids get the hashes that later prompts have; ``inferred`` (null: not read yet) are these.
    """
    inferred, hashed, requests = inferred or outputs.inferred_outputs(reader), 0, 0
    for record in reader:
        requests += 1
        hashed += record.block_hashes is not None
        if record.prompt_tokens:
            yield inferred.fill(record)
    end_reading(reader, hashed, requests)


def finest_records(reader: TraceReader, page_size: int) -> tuple[Meta, Iterator[Record]]:
    """Return header and ``hashed_records``; at block size 1 for smaller pages, if the trace has branches."""
    meta, size = reader.meta, reader.meta.block_size or 1
    if page_size >= size or meta.hash is None or not meta.hash.branches:
        return meta, hashed_records(reader)
    inferred = outputs.inferred_outputs(reader)
    with open_trace(reader.path) as records:
        chains = tokenchains.TokenChains(tokenchains.branches_of(map(inferred.fill, records), size))
    return tokenchains.token_meta(meta), map(chains.expand, hashed_records(reader, inferred))


def end_reading(reader: TraceReader, hashed: int, requests: int) -> None:
    """Print the warnings of a trace that was read whole. Raises InputError if none of it was ``hashed``."""
    for warning in reader.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not hashed:
        raise InputError(f"{reader.path}: block_hashes: no record has any; expected a trace with block hashes")
    if part := rests_on(hashed, requests, "block hashes"):
        print(f"warning: hits are {part}", file=sys.stderr)


def hashed_batches(reader: TraceReader) -> Iterator[tuple[Batch, Hashes]]:
    """Yield batches and their chains, as ``hashed_records``."""
    hashed, requests, inferred = 0, 0, outputs.inferred_outputs(reader)
    with batches.without_collector():
        for batch in reader.batches():
            hashes = batch.hashes()
            requests += len(batch)
            hashed += int(np.count_nonzero(hashes.prompt_blocks != batches.NO_LIST))
            yield batch, inferred.fill_hashes(batch, hashes)
    end_reading(reader, hashed, requests)


def in_file_order(batches: Iterator[tuple[Batch, Hashes]]) -> Iterator[tuple[Batch, Hashes]]:
    """Yield ``batches``; at the end, tell of requests that stand behind others that came later and ended long after."""
    came_ms, ended_ms, behind, requests = -np.inf, -np.inf, 0, 0
    for batch, hashes in batches:
        arrival_ms = batch.times("arrival_ms")
        ends_ms = arrival_ms + np.nan_to_num(batch.times("e2e_ms"))
        before_ms = np.fmax.accumulate(np.append(came_ms, arrival_ms))
        reached_ms = np.fmax.accumulate(np.append(ended_ms, ends_ms))
        came_ms, ended_ms = before_ms[-1], reached_ms[-1]
        behind += int(((ends_ms < reached_ms[1:] - FAR_MS) & (arrival_ms < before_ms[1:])).sum())
        requests += len(ends_ms)
        yield batch, hashes
    if behind:
        print(
            f"warning: {behind:,} of {requests:,} requests stand in the file behind others that ended more than "
            f"{FAR_MS / 1e3:.0f} s later; they are taken in file order (sim curve: by arrival)",
            file=sys.stderr,
        )


def known_blocks(batch: Batch, hashes: Hashes, chains: Chains) -> IntArray:
    """Count the leading full blocks with a hash in the trace."""
    prompt, true = np.maximum(hashes.prompt_blocks, 0), batch.numbers("hashable_blocks", UNKNOWN)
    true = np.where(true == UNKNOWN, prompt, np.minimum(true, prompt))
    tokens = (batch.numbers("prompt_tokens"), batch.numbers("output_tokens"))
    return count_known(
        (prompt, true, np.maximum(hashes.output_blocks, 0)), tokens, chains.fine_block_size, chains.factor
    )


def leading_hashes(hashes: Hashes, starts: IntArray, counts: IntArray, factor: int) -> UInt64Array:
    """Return the hashes of the first ``counts`` blocks at ``starts``; a block is ``factor`` blocks of the trace."""
    if factor == 1 and int(counts.sum()) == len(hashes.values):
        return hashes.values
    return hashes.values[leading_places(starts, counts, factor)]
