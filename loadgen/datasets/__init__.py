"""Datasets for loads: sessions from files, with token counts or texts.

A trace gives token counts and think times, without arrivals and prefix sharing between sessions. A request that
continues another is a later turn of its session: its new tokens are the prompt tokens beyond the parent's prompt and
output. Only the first child continues a session; further children start new sessions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.datasets.conversations import read_messages, read_sharegpt
from loadgen.datasets.session import CountTokens, Dataset, DatasetSession, DatasetTurn
from tracefile.files.reading import open_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import Record, RequestId

RANDOM = "random"
"""Sessions drawn from flags, without a file."""


@dataclass(slots=True)
class SessionBuilder:
    """Session of a trace during the read, with its context tokens."""

    turns: list[DatasetTurn] = field(default_factory=list)
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
        self.tokens = record.context_tokens()


def read_trace(path: Path, count: CountTokens | None) -> Iterator[DatasetSession]:
    """Sessions of a trace in any format of ``open_trace``: token counts and think times."""
    del count
    with open_trace(path) as reader:
        yield from _grouped(record for record in reader if record.prompt_tokens)


def _grouped(records: Iterable[Record]) -> Iterator[DatasetSession]:
    """Sessions in order of their first arrival."""
    sessions: list[SessionBuilder] = []
    by_last: dict[RequestId, SessionBuilder] = {}
    for record in sorted(records, key=lambda record: record.arrival_ms or 0.0):
        session = by_last.pop(record.parent_id, None) if record.parent_id is not None else None
        if session is None:
            session = SessionBuilder()
            sessions.append(session)
        session.add(record)
        by_last[record.request_id] = session
    return (session.turns for session in sessions)


DATASETS: dict[str, Dataset] = {
    "sharegpt": Dataset(read_sharegpt, has_texts=True),
    "messages": Dataset(read_messages, has_texts=True),
    "trace": Dataset(read_trace, has_texts=False),
}
"""File datasets by the name in ``--dataset NAME:PATH``."""


def parse_dataset(text: str) -> tuple[str, Path | None]:
    """Return name and file of a dataset from ``NAME:PATH``. Raises InputError."""
    name, _, path = text.partition(":")
    if name == RANDOM and not path:
        return RANDOM, None
    if name not in DATASETS:
        raise InputError(f"--dataset: {text!r}; expected {RANDOM}, or NAME:PATH with NAME one of {', '.join(DATASETS)}")
    if not path:
        raise InputError(f"--dataset: {name} without a file; expected {name}:PATH")
    if not Path(path).exists():
        raise InputError(f"--dataset: {path}: missing; expected a file of sessions")
    return name, Path(path)
