"""Rules 6 and 8 of docs/simulator.md as plain functions of numbers and of numpy arrays."""

from typing import TypeVar

from tracefile.records.arrays import IntArray

Count = TypeVar("Count", int, IntArray)


def lookup_limit(num_tokens: Count, block_size: int, prompt_logprobs: Count) -> Count:
    """Leading blocks that may hit: the last token is always computed (rule 6), and the whole prompt where
    ``prompt_logprobs`` is 1, not 0: log probabilities of all its tokens were asked for."""
    return (num_tokens - 1) // block_size * (1 - prompt_logprobs)


def blocks_for(num_tokens: Count, block_size: int) -> Count:
    return -(-num_tokens // block_size)
