"""A step before it is composed: how much room it has left, whom it will sample, what can be hit within it."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepAhead:
    """What those who are surely in the step make of it."""

    budget: int
    """Tokens that it has left."""
    most_per_request: int
    block_size: int
    sampling: list[tuple[int, int]] = field(default_factory=list)
    """Places of those it samples, and which of their tokens."""
    filled: set[int] = field(default_factory=set)
    """Keys of blocks that get full in it: whoever comes later in the step hits them."""

    def add(self, place: int, token: int, hashes: Sequence[int], depth: int, tokens: int) -> None:
        """Serve a request that has ``depth`` tokens and lacks ``tokens``, as far as the budget goes."""
        share = min(tokens, self.most_per_request, self.budget)
        self.budget -= share
        if share == tokens > 0:
            self.sampling.append((place, token))
        if share > 1:
            self.filled.update(hashes[depth // self.block_size : (depth + share) // self.block_size])
