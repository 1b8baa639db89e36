"""Chains of block hashes as arrays of numbers, and the blocks of each request that a trace knows."""

from typing import Final, NamedTuple

import numpy as np

from tracefile.records.arrays import Int32Array, IntArray, UInt64Array

NO_HASHES: Final = -1


class Chains(NamedTuple):
    """Chains of n requests: a prompt's blocks, then its output's, as numbers; equal hashes have equal numbers."""

    block_size: int
    numbers: Int32Array
    hashes: UInt64Array
    """By number."""
    starts: IntArray
    """Place of each request's first number."""
    prompts: IntArray
    """Blocks of each prompt; NO_HASHES: the record has none."""
    true: IntArray
    """Leading blocks of the prompt that the chain is true for; NO_HASHES likewise."""
    outputs: IntArray
    unread: IntArray
    """1: log probabilities of the prompt were asked for, so that it is not looked up; 0: it is."""


def chain_places(starts: IntArray, counts: IntArray) -> IntArray:
    """Places starts[0], starts[0] + 1 … ``counts[0]`` of them, then likewise for the next start."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts))


def leading_places(starts: IntArray, counts: IntArray, factor: int) -> IntArray:
    """Places of the hashes of the first ``counts`` blocks at ``starts``; a block's is its last of ``factor``."""
    within = chain_places(np.zeros(len(counts), np.int64), counts)
    return np.asarray(np.repeat(starts, counts) + within * factor + factor - 1)


def known_blocks(
    blocks: tuple[IntArray, IntArray, IntArray], tokens: tuple[IntArray, IntArray], fine_block_size: int, factor: int
) -> IntArray:
    """Count the leading blocks of each request, full at its end, whose hashes a trace has.

    ``blocks``: hashes of the prompt, those of them that are true, hashes of the output, 0 for none; ``tokens``: of
    prompt and output. Counted are blocks of ``factor`` such; an output's follow only a prompt known to its end.
    """
    prompt_blocks, true_blocks, output_blocks = blocks
    prompt_tokens, output_tokens = tokens
    block_size = factor * fine_block_size
    whole = prompt_blocks == prompt_tokens // fine_block_size
    known, prompt = true_blocks // factor, prompt_blocks // factor
    goes_on = (known == prompt) & (known == prompt_tokens // block_size) & (whole | (factor == 1))
    computed = prompt_tokens + np.maximum(output_tokens - 1, 0)
    in_all = (prompt_blocks + output_blocks) // factor
    return np.minimum(np.where(goes_on, in_all, known), computed // block_size)
