"""Waves of sessions as a plan: a wave's sessions begin once all of the one before it are over.

A wave's sessions come one after another at random distances. These are told in how long a session of that size took
in the stage ``alone``, so that a wave is as dense on a fast engine as on a slow one. What is sent is thus decided by
the seed; only when, by the engine, as in any closed loop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from loadgen.core.plan import Answer, Send
from loadgen.plan.conversation import Conversations, Turn
from loadgen.plan.stages import Wave

BUSY = 0.6
"""Of the time, by what its sessions take alone, the engine works on the mix: enough for requests to meet, too little
for them to queue up."""
NEARLY_AT_ONCE = 0.02
"""Of what a session takes alone, between two of another wave: all are answered together, and no two arrive so."""
SETTLE_MS = 100.0
"""Between waves, for the engine to come to rest."""


@dataclass(slots=True)
class StagedPlan:
    """Begins the waves one after another; ``plan`` is the first one, and what follows comes of its answers."""

    load: Conversations
    waves: Iterator[Wave]
    _wave: Wave | None = field(default=None, init=False)
    _began_ms: float = field(default=0.0, init=False)
    _open: int = field(default=0, init=False)
    """Sessions of the wave that are not over."""
    _alone: list[tuple[int, float]] = field(default_factory=list, init=False)
    """Of each session that was answered with nothing beside it: its first prompt's tokens, and how long it took."""

    def plan(self) -> Sequence[Send]:
        """The first wave."""
        return self._begin(0.0)

    def _begin(self, now_ms: float) -> Sequence[Send]:
        """The next wave's first turns, by when they are due from now; none where the run is over."""
        ends_ms = self.load.ends_ms
        self._wave = None if ends_ms is not None and now_ms >= ends_ms else next(self.waves, None)
        if self._wave is None:
            return []
        self._began_ms, self._open = now_ms + SETTLE_MS, len(self._wave.sessions)
        return [
            Turn(self.load, session, 0, None, self._over).open(SETTLE_MS + start_ms)
            for session, start_ms in zip(self._wave.sessions, self._starts_ms(self._wave), strict=True)
        ]

    def _over(self, answer: Answer) -> Sequence[Send]:
        """A session is over; its wave too, if it was the last one of it."""
        assert self._wave is not None  # some session of it was open
        if self._wave.stage == "alone" and answer.ok:
            first = self._wave.sessions[0].turns[0]
            self._alone.append((first.prompt_tokens, answer.end_ms - self._began_ms))
        self._open -= 1
        return [] if self._open else self._begin(answer.end_ms)

    def _starts_ms(self, wave: Wave) -> Sequence[float]:
        """When each session begins, from the wave's beginning."""
        if wave.stage == "alone" or not self._alone:
            return [0.0] * len(wave.sessions)
        sizes, took_ms = zip(*sorted(self._alone), strict=True)
        # Those took two turns; more take as much longer, at most.
        longer = [max(len(session.turns) / 2, 1.0) for session in wave.sessions]
        expected_ms = longer * np.interp([session.turns[0].prompt_tokens for session in wave.sessions], sizes, took_ms)
        pace = 1 / BUSY if wave.stage == "mix" else NEARLY_AT_ONCE
        return list(accumulate(pace * float(ms) * space for ms, space in zip(expected_ms, wave.spaces, strict=True)))
