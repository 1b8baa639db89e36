"""Slots of a closed loop of sessions: once the one that runs in it has ended, the next in order takes its place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.core.plan import Send

if TYPE_CHECKING:
    from replay.sending import Replayed


@dataclass(slots=True)
class Slot:
    """One place, held by a session until all that follows from its first request has ended."""

    waiting: "Iterator[Replayed]"
    """The roots still to come, one queue for all slots."""
    open: int = 1
    """Requests of the session in it that are on their way or waited for."""

    def ended(self, followers: int) -> Sequence[Send]:
        """One of its requests has ended, and so many follow from it; gives the next root if the slot is free now."""
        self.open += followers - 1
        if self.open:
            return ()
        following = next(self.waiting, None)
        if following is None:
            return ()
        self.open = 1
        following.slot = self
        return [following.send(0.0)]
