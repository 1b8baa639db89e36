"""Chains of block hashes as arrays of numbers, and the number of hashed blocks of each request."""

from typing import Final, NamedTuple

import numpy as np

from tracefile.records.arrays import Int32Array, IntArray, UInt64Array

NO_HASHES: Final = -1


class Chains(NamedTuple):
    """Chains of n requests: prompt blocks, then output blocks, as numbers; equal hashes have equal numbers."""

    block_size: int
    numbers: Int32Array
    hashes: UInt64Array
    """Block hash by number."""
    starts: IntArray
    """Index of each request's first number."""
    prompts: IntArray
    """Blocks of each prompt; NO_HASHES: the record has none."""
    true: IntArray
    """Leading prompt blocks with a true hash; NO_HASHES: the record has none."""
    outputs: IntArray
    unread: IntArray
    """1: log probabilities of the prompt are requested, so no prefix lookup; 0: prefix lookup."""


def chain_indices(starts: IntArray, counts: IntArray) -> IntArray:
    """Return the indices of all blocks: ``counts[i]`` consecutive indices from ``starts[i]``, chain by chain."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts))


def leading_indices(starts: IntArray, counts: IntArray, factor: int) -> IntArray:
    """Return the hash indices of the first ``counts`` blocks at ``starts``: the last of ``factor`` trace blocks."""
    within = chain_indices(np.zeros(len(counts), np.int64), counts)
    return np.asarray(np.repeat(starts, counts) + within * factor + factor - 1)


def count_hashed_blocks(
    blocks: tuple[IntArray, IntArray, IntArray], tokens: tuple[IntArray, IntArray], fine_block_size: int, factor: int
) -> IntArray:
    """Count the leading full blocks of each request with a hash in the trace.

    ``blocks``: number of prompt hashes, of true prompt hashes, of output hashes; ``tokens``: of prompt and output. A
    counted block spans ``factor`` trace blocks; output blocks count only after a fully hashed prompt.
    """
    prompt_blocks, true_blocks, output_blocks = blocks
    prompt_tokens, output_tokens = tokens
    block_size = factor * fine_block_size
    complete = prompt_blocks == prompt_tokens // fine_block_size
    hashed, prompt = true_blocks // factor, prompt_blocks // factor
    counts_output = (hashed == prompt) & (hashed == prompt_tokens // block_size) & (complete | (factor == 1))
    computed = prompt_tokens + np.maximum(output_tokens - 1, 0)
    total = (prompt_blocks + output_blocks) // factor
    return np.minimum(np.where(counts_output, total, hashed), computed // block_size)
