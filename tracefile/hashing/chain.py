"""Hash chain of a record, and the part of the chain that a later prompt repeats."""

from collections.abc import Sequence
from typing import NamedTuple

from tracefile.records.schema import BlockHash, Continuation, Record


class Chain(NamedTuple):
    """Hash chain of a record."""

    prompt: Sequence[BlockHash]
    """Blocks of the prompt with valid hashes."""
    output: Sequence[BlockHash]
    complete: bool
    """All full blocks of the prompt have hashes, so the end of the chain is the end of the request."""

    @property
    def extended(self) -> Sequence[BlockHash]:
        """Return the blocks after which the prompt has another block."""
        return self.prompt[:-1] if self.complete else self.prompt


def chain_of(record: Record, block_size: int) -> Chain:
    """Return the hash chain of a record, empty without hashes."""
    hashes = record.block_hashes or []
    prompt = hashes if record.hashable_blocks is None else hashes[: record.hashable_blocks]
    full = len(hashes) if record.prompt_tokens is None else record.prompt_tokens // block_size
    complete = len(prompt) >= full
    return Chain(prompt, record.output_block_hashes or [] if complete else [], complete)


class RepeatedOutput(NamedTuple):
    """Blocks of a prompt that repeat the output of its parent."""

    first: int
    """Index of the first block; it may begin with the end of the parent's prompt."""
    end: int
    continuation: Continuation | None
    """Null: unknown from the cached tokens."""


def repeated_output(
    parent_tokens: tuple[int, int], cached_tokens: int | None, block_size: int, engine_block_size: int
) -> RepeatedOutput:
    """Return the blocks of a later prompt that repeat its parent's output, from ``parent_tokens`` (prompt, output).

    A prefix hit that ends inside the output ends where the later prompt and the output diverge. ``cached_tokens``: of
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
