"""Any trace that ``open_trace`` reads as a dataset: its lengths and pauses, without its arrivals and its sharing.

A request that goes on from another is a later turn of its session: of its prompt, what is longer than the prompt and
answer before is new. Of several that go on from the same one, the first does; the others begin sessions of their own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.datasets.session import CountTokens, DatasetSession, DatasetTurn
from tracefile import Record, RequestId, TraceFormat, open_trace

WITHOUT_SESSIONS: tuple[TraceFormat, ...] = ("mooncake",)


@dataclass(slots=True)
class Growing:
    """A session being put together."""

    turns: list[DatasetTurn] = field(default_factory=list)
    last: RequestId | None = None
    tokens: int = 0

    def add(self, record: Record) -> None:
        prompt = record.prompt_tokens or 0
        self.turns.append(
            DatasetTurn(
                max(1, prompt - self.tokens),
                output_tokens=max(1, record.output_tokens or 1),
                think_ms=record.think_ms if self.turns else 0.0,
            )
        )
        self.last, self.tokens = record.request_id, record.context_tokens()


def read_trace(path: Path, count: CountTokens | None) -> Iterator[DatasetSession]:
    """Sessions of a trace in any form that ``open_trace`` reads."""
    del count
    with open_trace(path) as reader:
        known = (record for record in reader if record.prompt_tokens)
        yield from _alone(known) if reader.format in WITHOUT_SESSIONS else _grouped(known)


def _alone(records: Iterable[Record]) -> Iterator[DatasetSession]:
    for record in records:
        session = Growing()
        session.add(record)
        yield session.turns


def _grouped(records: Iterable[Record]) -> Iterator[DatasetSession]:
    """Sessions in order of their first requests' arrival."""
    sessions: list[Growing] = []
    by_last: dict[RequestId, Growing] = {}
    for record in sorted(records, key=lambda record: record.arrival_ms or 0.0):
        session = by_last.pop(record.parent_id, None) if record.parent_id is not None else None
        if session is None:
            session = Growing()
            sessions.append(session)
        session.add(record)
        by_last[record.request_id] = session
    return (session.turns for session in sessions)
