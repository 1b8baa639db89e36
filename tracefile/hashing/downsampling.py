"""A trace at a coarser block size: every n-th hash of a chain is the chain at n times the size, exactly."""

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import Record


def downsample(record: Record, meta_block_size: int, factor: int) -> Record:
    """The record as if captured at ``factor`` times ``meta_block_size``; the input is left alone.

    Prompt and output hashes are one chain, so they are thinned as one and parted at ``prompt_tokens`` // new size:
    a coarse block with any output token belongs to the output, even where its first fine blocks were the prompt's.
    Where the prompt's chain stops short of its full blocks, the output's hashes have no known place and become null.
    """
    if factor < 1:
        raise InputError(f"block size factor: {factor}; expected 1 or more")
    prompt = record.block_hashes
    output = record.output_block_hashes
    if prompt is None or factor == 1:
        return msgspec.structs.replace(record)
    whole = record.prompt_tokens is None or len(prompt) == record.prompt_tokens // meta_block_size
    chain = [*prompt, *(output or ())][factor - 1 :: factor]
    coarse = len(prompt) // factor
    return msgspec.structs.replace(
        record,
        block_hashes=chain[:coarse],
        output_block_hashes=chain[coarse:] if output is not None and whole else None,
        hashable_blocks=None if record.hashable_blocks is None else record.hashable_blocks // factor,
        branch_tokens=None,
        branch_hash=None,
    )
