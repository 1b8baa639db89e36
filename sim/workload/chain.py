"""Block keys of a record, as for the engine's prefix cache: a key per full block, prompt then output.

A recorded block hash is the key. A block without a hash (an output without token ids, a prompt beyond
``hashable_blocks``) has a private key: it occupies KV cache and is evicted like any block, and no other request hits
it.
"""

import sys
from collections.abc import Iterator

import numpy as np

from measure.cache.chains import count_hashed_blocks, leading_indices
from measure.number_format import coverage_text
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
"""Distance between ends from which a request is out of order in the file, in ms."""
FIRST_PRIVATE = -(2**63) - 1
"""First private key; private keys descend, below every 64-bit hash, including signed hashes of other tools."""


class Chains:
    """Converts records of a trace to chains of block keys at the engine's ``block_size``; None: the trace's.

    Raises InputError, naming both sizes, unless the engine's is a multiple of the trace's. A trace without block hashes
    has only private keys, and needs ``block_size``.
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

    def block_keys(self, record: Record) -> list[int]:
        """Return keys of all blocks at the end, including a partial last block: hashes, then private keys."""
        keys, first = self.hashed_keys(record), self._next_private
        self._next_private -= -(-tokens_computed(record) // self.block_size) - len(keys)
        return [*keys, *range(first, self._next_private, -1)]

    def hashed_keys(self, record: Record) -> list[int]:
        """Return the block hashes of full blocks in the trace."""
        keys, output = self._prompt_and_output(record)
        if output and len(keys) == (record.prompt_tokens or 0) // self.block_size:
            keys = keys + output
        return keys[: tokens_computed(record) // self.block_size]

    def _prompt_and_output(self, record: Record) -> tuple[list[int], list[int]]:
        """Return block hashes of the prompt and of the output, at the engine's block size."""
        if self.factor > 1:
            record = downsample(record, self.fine_block_size, self.factor)
        prompt: list[int] = list(record.block_hashes or ())
        output: list[int] = list(record.output_block_hashes or ())
        true = record.hashable_blocks
        return (prompt, output) if true is None or true >= len(prompt) else (prompt[:true], [])


def engine_chains(meta: Meta, block_size: int | None) -> Chains:
    """Return chains at ``block_size``, else at the engine's block size if it is a multiple, else at the trace's."""
    reported, fine = (0 if meta.engine is None else meta.engine.block_size or 0), meta.block_size or 1
    return Chains(meta, block_size or (reported if reported % fine == 0 else 0) or None)


def tokens_computed(record: Record) -> int:
    """Return the tokens of ``record`` with computed KV: all but the last generated token."""
    return (record.prompt_tokens or 0) + max((record.output_tokens or 0) - 1, 0)


def hashed_records(reader: TraceReader, inferred: InferredOutputs | None = None) -> Iterator[Record]:
    """Yield records with a prompt length; print warnings at the end. Raises InputError if no record has block hashes.

    Outputs without token ids get hashes from later prompts: ``inferred`` (null: read here).
    """
    inferred, hashed, requests = inferred or outputs.inferred_outputs(reader), 0, 0
    for record in reader:
        requests += 1
        hashed += record.block_hashes is not None
        if record.prompt_tokens:
            yield inferred.fill(record)
    end_reading(reader, hashed, requests)


def finest_records(reader: TraceReader, page_size: int) -> tuple[Meta, Iterator[Record]]:
    """Return header and ``hashed_records``; at block size 1 if pages are smaller than blocks and the trace has
    branches."""
    meta, size = reader.meta, reader.meta.block_size or 1
    if page_size >= size or meta.hash is None or not meta.hash.branches:
        return meta, hashed_records(reader)
    inferred = outputs.inferred_outputs(reader)
    with open_trace(reader.path) as records:
        chains = tokenchains.TokenChains(tokenchains.branches_of(map(inferred.fill, records), size))
    return tokenchains.token_meta(meta), map(chains.expand, hashed_records(reader, inferred))


def end_reading(reader: TraceReader, hashed: int, requests: int) -> None:
    """Print the warnings after a complete read. Raises InputError if no request has block hashes."""
    for warning in reader.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not hashed:
        raise InputError(f"{reader.path}: block_hashes: no record has any; expected a trace with block hashes")
    if coverage := coverage_text(hashed, requests, "block hashes"):
        print(f"warning: hits are {coverage}", file=sys.stderr)


def hashed_batches(reader: TraceReader) -> Iterator[tuple[Batch, Hashes]]:
    """Yield batches with their block hashes, as ``hashed_records``."""
    hashed, requests, inferred = 0, 0, outputs.inferred_outputs(reader)
    with batches.without_collector():
        for batch in reader.batches():
            hashes = batch.hashes()
            requests += len(batch)
            hashed += int(np.count_nonzero(hashes.prompt_blocks != batches.NO_LIST))
            yield batch, inferred.fill_hashes(batch, hashes)
    end_reading(reader, hashed, requests)


def in_file_order(batches: Iterator[tuple[Batch, Hashes]]) -> Iterator[tuple[Batch, Hashes]]:
    """Yield ``batches``; at the end, warn of requests that are out of order by more than ``FAR_MS``."""
    latest_arrival_ms, latest_end_ms, out_of_order, requests = -np.inf, -np.inf, 0, 0
    for batch, hashes in batches:
        arrival_ms = batch.times("arrival_ms")
        ends_ms = arrival_ms + np.nan_to_num(batch.times("e2e_ms"))
        latest_arrivals_ms = np.fmax.accumulate(np.append(latest_arrival_ms, arrival_ms))
        latest_ends_ms = np.fmax.accumulate(np.append(latest_end_ms, ends_ms))
        latest_arrival_ms, latest_end_ms = latest_arrivals_ms[-1], latest_ends_ms[-1]
        out_of_order += int(((ends_ms < latest_ends_ms[1:] - FAR_MS) & (arrival_ms < latest_arrivals_ms[1:])).sum())
        requests += len(ends_ms)
        yield batch, hashes
    if out_of_order:
        print(
            f"warning: {out_of_order:,} of {requests:,} requests follow requests in the file that ended more than "
            f"{FAR_MS / 1e3:.0f} s later; file order is used (sim curve: order of arrival)",
            file=sys.stderr,
        )


def hashed_block_counts(batch: Batch, hashes: Hashes, chains: Chains) -> IntArray:
    """Count the leading full blocks of each request with a hash in the trace."""
    prompt, true = np.maximum(hashes.prompt_blocks, 0), batch.numbers("hashable_blocks", UNKNOWN)
    true = np.where(true == UNKNOWN, prompt, np.minimum(true, prompt))
    tokens = (batch.numbers("prompt_tokens"), batch.numbers("output_tokens"))
    return count_hashed_blocks(
        (prompt, true, np.maximum(hashes.output_blocks, 0)), tokens, chains.fine_block_size, chains.factor
    )


def leading_hashes(hashes: Hashes, starts: IntArray, counts: IntArray, factor: int) -> UInt64Array:
    """Return the hashes of the first ``counts`` blocks at ``starts``; a block spans ``factor`` blocks of the trace."""
    if factor == 1 and int(counts.sum()) == len(hashes.values):
        return hashes.values
    return hashes.values[leading_indices(starts, counts, factor)]
