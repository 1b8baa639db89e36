"""The segment being written: lines taken a batch at a time, and what the manifest will say of it once it is closed."""

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tracefile.storage.appending import TraceFile
from tracefile.storage.segments import Segment

BATCH_LINES = 256
"""Lines that are compressed at once: a call a line would cost as much as the line."""


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(slots=True)
class OpenSegment:
    """The file being written, with what the manifest will say of it."""

    file: TraceFile
    path: Path
    """Where it will be once it is closed."""
    records: int = 0
    first_arrival_ms: float = float("inf")
    last_arrival_ms: float = float("-inf")
    first_at: float = float("inf")
    """When its first record came, on the monotonic clock."""
    digest: _Digest = field(default_factory=hashlib.sha256)
    lines: list[bytes] = field(default_factory=list)
    """Taken, not compressed yet."""
    arrivals_ms: list[float] = field(default_factory=list)
    """Of those."""

    def take(self, line: bytes, arrival_ms: float | None) -> None:
        """Take one record's line."""
        self.lines.append(line)
        self.records += 1
        if arrival_ms is not None:
            self.arrivals_ms.append(arrival_ms)
        if len(self.lines) >= BATCH_LINES:
            self.compress()

    def compress(self) -> None:
        """Hand the lines taken to the file."""
        if self.lines:
            batch = b"".join(self.lines)
            self.lines.clear()
            self.digest.update(batch)
            self.file.take(batch)
            self.first_arrival_ms = min([self.first_arrival_ms, *self.arrivals_ms])
            self.last_arrival_ms = max([self.last_arrival_ms, *self.arrivals_ms])
            self.arrivals_ms.clear()
            self.first_at = min(self.first_at, time.monotonic())

    def listed(self) -> Segment:
        """Its line in the manifest."""
        return Segment(
            name=self.path.name,
            records=self.records,
            bytes=self.file.size,
            first_arrival_ms=self.first_arrival_ms if self.first_arrival_ms < float("inf") else None,
            last_arrival_ms=self.last_arrival_ms if self.last_arrival_ms > float("-inf") else None,
            digest=self.digest.hexdigest(),
        )
