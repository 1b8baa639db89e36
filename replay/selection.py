"""Which part of a trace is sent again: a window of its clock, or its first requests."""

from dataclasses import dataclass

from tracefile import Record


@dataclass(frozen=True, slots=True)
class Selection:
    """``--start``, ``--end`` and ``--limit``."""

    start_s: float | None = None
    """On the trace's clock; null: from its beginning. What arrived before is left out, its follow-ups are not: they
    find their context in the cache as far as others' prompts put it there."""
    end_s: float | None = None
    """What arrived then or later is left out; null: to its end."""
    limit: int | None = None
    """Of what is left, the first so many by arrival; null: all."""

    def why_not(self, record: Record) -> str | None:
        """Why a record lies outside; null: it does not."""
        arrival_ms = record.arrival_ms or 0.0
        if self.start_s is not None and arrival_ms < self.start_s * 1000:
            return "before --start"
        if self.end_s is not None and arrival_ms >= self.end_s * 1000:
            return "after --end"
        return None


ALL = Selection()
