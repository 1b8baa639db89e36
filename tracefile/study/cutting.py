"""``tracefile cut``: a part of a trace, in whole sessions."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tracefile.records.errors import InputError
from tracefile.records.schema import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sessions to take: those that begin in a span of time, at most so many."""

    from_ms: float = 0.0
    """From the trace's first arrival."""
    to_ms: float = math.inf
    sessions: int | None = None
    """Null: all."""

    def __post_init__(self) -> None:
        if not self.from_ms < self.to_ms:
            raise InputError(f"--to {self.to_ms / 1000:g}s: expected a time after --from {self.from_ms / 1000:g}s")
        if self.sessions is not None and self.sessions < 1:
            raise InputError(f"--sessions {self.sessions}; expected 1 or more")


@dataclass(slots=True)
class Sessions:
    """Beginnings of a trace's sessions; a request without one is a session of its own."""

    begins_ms: dict[str, float] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        if record.arrival_ms is None:
            raise InputError(f"request {record.request_id}: arrival_ms: missing; expected a time to cut at")
        name = session_name(record)
        self.begins_ms[name] = min(record.arrival_ms, self.begins_ms.get(name, math.inf))

    def taken(self, part: Part) -> set[str]:
        """Names of the part's sessions; raises InputError if there are none."""
        zero_ms = min(self.begins_ms.values(), default=0.0)
        inside = sorted(
            (begin_ms, name)
            for name, begin_ms in self.begins_ms.items()
            if part.from_ms <= begin_ms - zero_ms < part.to_ms
        )
        if not inside:
            span_s = (max(self.begins_ms.values(), default=0.0) - zero_ms) / 1000
            raise InputError(f"no session begins in that span; expected one within {span_s:,.1f} s, the trace's")
        return {name for _, name in inside[: part.sessions]}


def session_name(record: Record) -> str:
    """Name of a record's session, never that of a request without one."""
    return f"request {record.request_id}" if record.session_id is None else f"session {record.session_id}"


def cut(records: Iterable[Record], taken: set[str]) -> Iterator[Record]:
    """Records of the sessions that are taken."""
    return (record for record in records if session_name(record) in taken)
