"""A record's chain of block hashes, and the part of it that a later prompt repeats."""

from collections.abc import Sequence
from typing import NamedTuple

from tracefile.records.schema import BlockHash, Continuation, Record


class Chain(NamedTuple):
    """Hash chain of a record."""

    prompt: Sequence[BlockHash]
    """The prompt's blocks, as far as their hashes are true."""
    output: Sequence[BlockHash]
    whole: bool
    """No full block of the prompt is missing, so the chain's end is the request's."""

    @property
    def passed(self) -> Sequence[BlockHash]:
        """Return the blocks past which the prompt goes on."""
        return self.prompt[:-1] if self.whole else self.prompt


def chain_of(record: Record, block_size: int) -> Chain:
    """The record's chain; empty where it has no hashes."""
    hashes = record.block_hashes or []
    prompt = hashes if record.hashable_blocks is None else hashes[: record.hashable_blocks]
    full = len(hashes) if record.prompt_tokens is None else record.prompt_tokens // block_size
    whole = len(prompt) >= full
    return Chain(prompt, record.output_block_hashes or [] if whole else [], whole)


class RepeatedOutput(NamedTuple):
    """Blocks of a prompt that are its parent's output."""

    first: int
    """Index of the first one: it can begin with the end of the parent's prompt."""
    end: int
    continuation: Continuation | None
    """Null: the cached tokens do not tell."""


def repeated_output(
    parent_tokens: tuple[int, int], cached_tokens: int | None, block_size: int, engine_block_size: int
) -> RepeatedOutput:
    """Blocks of a later prompt that repeat its parent's output, by the length of the parent's prompt and output.

    A prefix hit that ends inside the output ends where the later prompt and the output differ. ``cached_tokens``: of
    the later prompt, in blocks of ``engine_block_size``.
    """
    prompt_tokens, output_tokens = parent_tokens
    first = prompt_tokens // block_size
    end = max((prompt_tokens + output_tokens - 1) // block_size, first)
    begins, complete = (at * block_size // engine_block_size * engine_block_size for at in (first, end))
    if cached_tokens is None or cached_tokens < begins or begins == complete:
        return RepeatedOutput(first, end, None)  # missed, or evicted, before the output begins
    if cached_tokens >= complete:
        return RepeatedOutput(first, end, "exact")
    return RepeatedOutput(first, max(first, cached_tokens // block_size), "altered")
