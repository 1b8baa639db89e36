"""Statistics of a workload's sessions: probability of another turn, rest between turns, growth, time in service."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    from tracefile.files import reading
    from tracefile.records.schema import Record, SessionId
else:  # a trace is read where a user names one
    reading = LateModule("tracefile.files.reading")

MAX_TURN = 64
"""Turns counted apart; later ones together."""
PRIOR_SESSIONS = 4.0
"""Weight of the mean over all turns in the estimate for one turn, in sessions."""
TURNS_AHEAD = 3
"""Turns that a router looks ahead."""


class RunningMean:
    """Mean of the values so far; the first ``weight`` of them are the prior."""

    __slots__ = ("value", "weight")

    def __init__(self, prior: float, weight: float) -> None:
        self.value, self.weight = prior, weight

    def add(self, value: float) -> None:
        self.weight += 1.0
        self.value += (value - self.value) / self.weight


class SessionStatistics:
    """Learnt from sessions as they go on and end; begun from a trace's sessions or from weak priors."""

    def __init__(self) -> None:
        self._went_on = [0] * (MAX_TURN + 1)
        self._ended = [0] * (MAX_TURN + 1)
        self.turns_seen = 0
        """Turns whose session is known to have gone on or ended."""
        self._all_went_on = 0
        self.rest_s = RunningMean(10.0, 1.0)
        """Time from a turn's end to the next turn's arrival: tools and people."""
        self.service_s = RunningMean(2.0, 1.0)
        """Time from a request's sending to its end."""
        self.growth_tokens = RunningMean(500.0, 1.0)
        """Prompt tokens that a turn adds to the one before."""

    def count(self, turn: int, *, went_on: bool) -> None:
        """Count a turn whose session went on to another one, or ended with it."""
        place = min(turn, MAX_TURN)
        (self._went_on if went_on else self._ended)[place] += 1
        self.turns_seen += 1
        self._all_went_on += went_on

    def another_turn(self, turn: int) -> float:
        """Return the probability that a session goes on after its turn ``turn``, from 1 on."""
        overall = (self._all_went_on + 1.0) / (self.turns_seen + 2.0)
        place = min(turn, MAX_TURN)
        went_on, ended = self._went_on[place], self._ended[place]
        return (went_on + PRIOR_SESSIONS * overall) / (went_on + ended + PRIOR_SESSIONS)

    def turns_ahead(self, turn: int) -> float:
        """Return the expected number of turns after ``turn``, of the next ``TURNS_AHEAD``."""
        expected, reached = 0.0, 1.0
        for later in range(turn, turn + TURNS_AHEAD):
            reached *= self.another_turn(later)
            expected += reached
        return expected

    @property
    def patience_s(self) -> float:
        """Rest after which a session counts as ended: four mean rests, 2 % of exponential ones."""
        return 4.0 * self.rest_s.value

    @property
    def active_share(self) -> float:
        """Share of a living session's time in which a request of it is in flight."""
        whole = self.service_s.value + self.rest_s.value
        return self.service_s.value / whole if whole > 0.0 else 1.0


def trace_statistics(records: "Iterable[Record]") -> SessionStatistics:
    """Return the statistics of a trace's sessions; a session ends with its last record."""
    statistics = SessionStatistics()
    latest: dict[SessionId, tuple[Record, int]] = {}
    for record in sorted(records, key=lambda record: record.arrival_ms or 0.0):
        if record.session_id is None:
            continue
        before, turn = latest.get(record.session_id, (None, 0))
        if before is not None:
            statistics.count(turn, went_on=True)
            if record.think_ms is not None:
                statistics.rest_s.add(record.think_ms / 1e3)
            statistics.growth_tokens.add(max(0, (record.prompt_tokens or 0) - (before.prompt_tokens or 0)))
        if record.e2e_ms is not None:
            statistics.service_s.add(record.e2e_ms / 1e3)
        latest[record.session_id] = record, record.turn or turn + 1
    for _, turn in latest.values():
        statistics.count(turn, went_on=False)
    return statistics


def read_statistics(path: str | os.PathLike[str]) -> SessionStatistics:
    """Read a trace's sessions. Raises InputError naming the file where it is no trace, or none of it has a session."""
    _, records = reading.load_trace(path)
    if all(record.session_id is None for record in records):
        raise InputError(f"{os.fspath(path)}: no record has a session; expected a trace with sessions")
    return trace_statistics(records)
