"""Output block hashes inferred from the prompt of the next turn, which repeats its parent's output.

An engine that does not report output token ids gives no hashes for the blocks that decode filled. The prompt of the
next turn has these blocks after the parent's prompt, up to the output's length. A client may have changed the output
(reasoning removed, other tokens for the same text). Cached tokens show how far the output came back unchanged: a prefix
hit that ends inside the output ends where prompt and output diverge.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from tracefile.files.reading import TraceReader, open_trace
from tracefile.hashing.branches import tail_key
from tracefile.hashing.chain import chain_of, repeated_output
from tracefile.records.batches import Batch, Hashes
from tracefile.records.schema import BlockHash, Meta, Record, RequestId


class InferredOutputs:
    """Output block hashes of requests without any, inferred from the prompts of their next turns.

    With an engine that caches single tokens, the next turn's prefix hit also shows the shared tokens of the next block.
    """

    def __init__(self, meta: Meta) -> None:
        self._block_size = meta.block_size or 1
        self._engine_block_size = (meta.engine and meta.engine.block_size) or self._block_size
        self._open: dict[RequestId, tuple[int, int, BlockHash | None]] = {}
        """Requests without output hashes: prompt tokens, output tokens, last full block of the prompt."""
        self._outputs: dict[RequestId, list[BlockHash]] = {}
        self._within: dict[RequestId, RequestId] = {}
        """Parent by request whose cached tokens end within a block of the parent's output."""

    def learn(self, record: Record) -> None:
        """Add a record, after its parent."""
        if record.block_hashes is None or record.prompt_tokens is None:
            return
        prompt, _, is_complete = chain_of(record, self._block_size)
        parent = None if record.parent_id is None else self._open.get(record.parent_id)
        if parent is not None and record.parent_id is not None:
            prompt_tokens, output_tokens, last = parent
            output = repeated_output(
                (prompt_tokens, output_tokens), record.cached_tokens, self._block_size, self._engine_block_size
            )
            previous_block = list(prompt[: output.first][-1:])
            is_continued = previous_block == [last] if last is not None else record.session_source == "inferred"
            if is_continued and output.end - output.first > len(self._outputs.get(record.parent_id, ())):
                self._outputs[record.parent_id] = list(prompt[output.first : output.end])
            hit = record.cached_tokens or 0
            is_within = is_continued and hit // self._block_size == output.end and hit % self._block_size > 0
            if is_within and prompt_tokens <= hit and hit > (record.branch_tokens or 0):
                self._within[record.request_id] = record.parent_id
                self._outputs.setdefault(record.parent_id, [])
        if is_complete and record.output_block_hashes is None and record.output_tokens and record.n is None:
            self._open[record.request_id] = record.prompt_tokens, record.output_tokens, prompt[-1] if prompt else None

    def fill(self, record: Record) -> Record:
        """Return the record with the output hashes that were inferred for it."""
        parent_id, output = self._within.get(record.request_id), self._outputs.get(record.request_id)
        if parent_id is not None:
            record = self._branched(record, parent_id)
        if output is None:
            return record
        return msgspec.structs.replace(record, output_block_hashes=output, output_hash_source="inferred")

    def _branched(self, record: Record, parent_id: RequestId) -> Record:
        """Return the record with its branch from the parent's output: in the block after the parent's known blocks."""
        prompt_tokens, _, last = self._open[parent_id]
        output, tokens = self._outputs.get(parent_id, []), record.cached_tokens or 0
        if prompt_tokens // self._block_size + len(output) != tokens // self._block_size:
            return record  # another turn repeats more blocks of the output
        block = tail_key(output[-1:] or ([] if last is None else [last]), parent_id)
        return msgspec.structs.replace(record, branch_tokens=tokens, branch_hash=block)

    def fill_hashes(self, batch: Batch, hashes: Hashes) -> Hashes:
        """Return the hash chains of a batch with the inferred output hashes of its requests."""
        if not self._outputs:
            return hashes
        outputs = [self._outputs.get(RequestId(name or "")) for name in batch.column("request_id")]
        rows = [row for row, output in enumerate(outputs) if output is not None]
        if not rows:
            return hashes
        counts = np.array([len(output or ()) for output in outputs])
        prompt_ends = hashes.starts + np.maximum(hashes.prompt_blocks, 0)
        values = np.array([block for row in rows for block in outputs[row] or ()], np.uint64)
        return Hashes(
            np.insert(hashes.values, np.repeat(prompt_ends[rows], counts[rows]), values),
            hashes.starts + np.cumsum(counts) - counts,
            hashes.prompt_blocks,
            np.where(counts > 0, counts, hashes.output_blocks),
        )


def infer_outputs(meta: Meta, records: Iterable[Record]) -> InferredOutputs:
    """Infer output hashes of records in finish order; none for traces of other tools."""
    inferred = InferredOutputs(meta)
    if meta.block_size is not None and meta.source is not None:
        for record in records:
            inferred.learn(record)
    return inferred


def inferred_outputs(reader: TraceReader) -> InferredOutputs:
    """``infer_outputs`` of the complete trace, which is read once more."""
    if reader.meta.source is None:
        return InferredOutputs(reader.meta)
    with open_trace(reader.path) as records:
        return infer_outputs(records.meta, records)
