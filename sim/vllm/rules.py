"""Rules 3, 6 and 8 of docs/simulator.md as plain functions of numbers: the plain pool and scheduler call them, numba
compiles them for the compiled ones, and the numpy passes give them arrays.
"""

from typing import Literal, TypeVar, get_args

from tracefile.records.arrays import IntArray

Count = TypeVar("Count", int, IntArray)
FreeRule = Literal["vllm", "append_all"]
"""Where a freed block goes. ``vllm``: hashed to the queue's tail, unhashed to its head; ``append_all``: all to the
tail, as vLLM did before."""
FREE_RULES: tuple[FreeRule, ...] = get_args(FreeRule)
"""The rules by their number in compiled code."""
_APPEND_ALL = FREE_RULES.index("append_all")


def goes_to_tail(free_rule: int, is_hashed: bool) -> bool:
    """Return whether a freed block joins the free queue's tail, to be reused last, or its head (rule 3)."""
    return is_hashed or free_rule == _APPEND_ALL


def lookup_limit(num_tokens: Count, block_size: int, prompt_logprobs: Count) -> Count:
    """Leading blocks that may hit: the last token is always computed (rule 6), and the whole prompt where
    ``prompt_logprobs`` is 1, not 0: log probabilities of all its tokens were asked for."""
    return (num_tokens - 1) // block_size * (1 - prompt_logprobs)


def blocks_for(num_tokens: Count, block_size: int) -> Count:
    return -(-num_tokens // block_size)


def blocks_needed(blocks: int, hits: int, idle_hits: int) -> int:
    """Free blocks that admitting a request of ``blocks`` uses up: those of its hits that no request holds leave the
    free queue too (rule 8)."""
    return blocks - hits + idle_hits
