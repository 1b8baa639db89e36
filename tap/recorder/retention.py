"""Retention: old closed segments are deleted whole, by age and by the room that all take; ``--keep``, ``--keep-gb``."""

import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracefile.storage.segments import Segment

AGED_AT_ONCE = 2
"""Most segments deleted for their age when one closes: a clock that jumps ahead deletes no whole trace at once."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Rule that names the segments to delete when another has closed.

    A segment is old only by two clocks: the trace's own, which is monotonic while a tap runs, and the file's time of
    change. The newest closed segment stays. So does one without write permission (``chmod a-w``), and one that is to be
    uploaded and is not yet.
    """

    keep_s: float | None = None
    keep_bytes: int | None = None
    uploads: bool = False
    now_unix_s: Callable[[], float] = time.time

    @property
    def keeps_all(self) -> bool:
        return self.keep_s is None and self.keep_bytes is None

    def expired(self, segments: Sequence[Segment], folder: Path, earlier: Sequence[Segment] = ()) -> list[Segment]:
        """Return the segments that are to be deleted, oldest first: of a manifest, and those of traces before it.

        ``earlier``: with arrivals on the clock of ``segments``.
        """
        if self.keeps_all:
            return []
        there = [
            segment for segment in (*earlier, *segments) if not segment.deleted and (folder / segment.name).is_file()
        ]
        free = [segment for segment in there[:-1] if self._may_go(segment, folder)]
        aged = [segment for segment in free if self._is_old(segment, there[-1], folder)][:AGED_AT_ONCE]
        return aged + list(self._too_many(there, [segment for segment in free if segment not in aged], aged))

    def _may_go(self, segment: Segment, folder: Path) -> bool:
        writable = (folder / segment.name).stat().st_mode & stat.S_IWUSR
        return bool(writable) and (segment.uploaded is not None or not self.uploads)

    def _is_old(self, segment: Segment, newest: Segment, folder: Path) -> bool:
        if self.keep_s is None:
            return False
        last_ms, now_ms = segment.last_arrival_ms, newest.last_arrival_ms
        if last_ms is not None and now_ms is not None and now_ms - last_ms <= self.keep_s * 1000:
            return False
        return self.now_unix_s() - (folder / segment.name).stat().st_mtime > self.keep_s

    def _too_many(
        self, there: Sequence[Segment], free: Sequence[Segment], aged: Sequence[Segment]
    ) -> Iterator[Segment]:
        """Yield the oldest until the others fit; sizes need no clock."""
        if self.keep_bytes is None:
            return
        held = sum(segment.bytes for segment in there) - sum(segment.bytes for segment in aged)
        for segment in free:
            if held <= self.keep_bytes:
                return
            held -= segment.bytes
            yield segment
