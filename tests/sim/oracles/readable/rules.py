"""Rules 6 and 8 of docs/simulator.md as plain functions."""


def lookup_limit(num_tokens: int, block_size: int, prompt_logprobs: int) -> int:
    """Leading blocks that may hit: the last token is always computed (rule 6), and the complete prompt where
    ``prompt_logprobs`` is 1, not 0: log probabilities of all its tokens were requested."""
    return (num_tokens - 1) // block_size * (1 - prompt_logprobs)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
