"""Larger block sizes: every n-th hash of a chain is exactly the chain at n times the block size."""

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import Record


def downsample(record: Record, meta_block_size: int, factor: int) -> Record:
    """Return the record as if captured with blocks of ``factor * meta_block_size`` tokens; the input is not modified.

    Prompt and output hashes are one chain: it is thinned, then split at ``prompt_tokens // new block size``. A block
    with any output token belongs to the output. If full blocks of the prompt have no hashes, the positions of the
    output hashes are unknown, and they become null.
    """
    if factor < 1:
        raise InputError(f"block size factor: {factor}; expected 1 or more")
    prompt = record.block_hashes
    output = record.output_block_hashes
    if prompt is None or factor == 1:
        return msgspec.structs.replace(record)
    complete = record.prompt_tokens is None or len(prompt) == record.prompt_tokens // meta_block_size
    chain = [*prompt, *(output or ())][factor - 1 :: factor]
    coarse = len(prompt) // factor
    return msgspec.structs.replace(
        record,
        block_hashes=chain[:coarse],
        output_block_hashes=chain[coarse:] if output is not None and complete else None,
        hashable_blocks=None if record.hashable_blocks is None else record.hashable_blocks // factor,
        branch_tokens=None,
        branch_hash=None,
    )
