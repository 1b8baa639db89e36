"""Open segment of a trace, and a file that another process removed while it was open."""

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from tracefile.storage.appending import TraceFile
from tracefile.storage.segments import Segment

BATCH_LINES = 256
"""Lines of a batch: a compression call costs as much as a line."""


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(slots=True)
class OpenSegment:
    """Open file of the trace, with the statistics of its manifest entry."""

    file: TraceFile
    path: Path
    records: int = 0
    first_arrival_ms: float = float("inf")
    last_arrival_ms: float = float("-inf")
    first_at: float = float("inf")
    inherited: int = 0
    """Records of earlier runs, the first of ``records``."""
    digest: _Digest = field(default_factory=hashlib.sha256)
    lines: list[bytes] = field(default_factory=list)
    arrivals_ms: list[float] = field(default_factory=list)

    def add_line(self, line: bytes, arrival_ms: float | None) -> None:
        self.lines.append(line)
        self.records += 1
        if arrival_ms is not None:
            self.arrivals_ms.append(arrival_ms)
        if len(self.lines) >= BATCH_LINES:
            self.compress()

    def compress(self) -> None:
        if self.lines:
            batch = b"".join(self.lines)
            self.lines.clear()
            self.digest.update(batch)
            self.file.add(batch)
            self.first_arrival_ms = min([self.first_arrival_ms, *self.arrivals_ms])
            self.last_arrival_ms = max([self.last_arrival_ms, *self.arrivals_ms])
            self.arrivals_ms.clear()
            self.first_at = min(self.first_at, time.monotonic())

    def listed(self) -> Segment:
        return Segment(
            name=self.path.name,
            records=self.records,
            bytes=self.file.size,
            first_arrival_ms=self.first_arrival_ms if self.first_arrival_ms < float("inf") else None,
            last_arrival_ms=self.last_arrival_ms if self.last_arrival_ms > float("-inf") else None,
            digest=self.digest.hexdigest(),
        )


class LostFile(NamedTuple):
    """A file that another process deleted, moved or changed while it was written."""

    path: str
    inherited: int
    """Records of earlier runs, the first of the file."""
    records: int
    """Records that are no longer in the trace, records of earlier runs included."""

    def __str__(self) -> str:
        return (
            f"{self.path}: deleted, moved or changed by another process; {self.records} RECORDS ARE LOST; "
            "recording continues in a new file"
        )
