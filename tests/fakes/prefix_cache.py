"""The prefix cache of every fake engine: a set of prefixes, unlimited, obvious, true."""

from collections.abc import Sequence


class PrefixCache:
    """Full blocks of ``block_size`` tokens, each known by all the tokens up to its end."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prefixes: set[tuple[int, ...]] = set()
        self.queries = 0
        """Prompt tokens looked up."""
        self.hits = 0
        """Prompt tokens found."""

    def look_up(self, prompt: Sequence[int]) -> int:
        """Cached tokens of a prompt: leading blocks that are there, never the whole prompt."""
        size, cached = self.block_size, 0
        while cached + size <= len(prompt) - 1 and tuple(prompt[: cached + size]) in self.prefixes:
            cached += size
        self.queries += len(prompt)
        self.hits += cached
        return cached

    def fill(self, tokens: Sequence[int]) -> None:
        """Add every full block of these tokens."""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            self.prefixes.add(tuple(tokens[:end]))

    def clear(self) -> None:
        self.prefixes.clear()
