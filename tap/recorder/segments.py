"""The trace as the recorder writes it: a file, or segments closed by size and age; resumed after a crash.

Records counted as recorded are in the files. On a full disk new records are refused and no accepted one is lost: every
flush tries again, and recording continues once there is room.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tap.recorder.opensegment import LostFile, OpenSegment
from tap.recorder.resumption import described, records_of, resume_file, resume_segments
from tracefile.records.encoding import encode_meta, encode_record
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.storage.appending import append_to, new_trace_file
from tracefile.storage.durable import rename_durably
from tracefile.storage.repair import repair
from tracefile.storage.segments import (
    Manifest,
    Segment,
    manifest_path,
    part_path,
    segment_path,
    segments_there,
    write_manifest,
)

AGED_AT_ONCE = 2
"""Most segments deleted when one closes: a clock that jumps ahead deletes no whole trace at once."""


def expired_segments(
    segments: Sequence[Segment],
    folder: Path,
    keep_s: float,
    *,
    uploads: bool = False,
) -> list[Segment]:
    """Return the closed segments to delete by ``--keep``, oldest first.

    A segment is old only by two clocks: the trace's own, which is monotonic while a tap runs, and the file's time of
    change. The newest closed segment stays. So does one without write permission (``chmod a-w``), and one that is to be
    uploaded and is not yet.
    """

    def is_old(segment: Segment, newest: Segment) -> bool:
        last_ms, now_ms = segment.last_arrival_ms, newest.last_arrival_ms
        if last_ms is not None and now_ms is not None and now_ms - last_ms <= keep_s * 1000:
            return False
        about = (folder / segment.name).stat()
        return bool(about.st_mode & stat.S_IWUSR) and time.time() - about.st_mtime > keep_s

    there = [segment for segment in segments if not segment.deleted and (folder / segment.name).is_file()]
    free = [segment for segment in there[:-1] if segment.uploaded is not None or not uploads]
    return [segment for segment in free if is_old(segment, there[-1])][:AGED_AT_ONCE]


class SegmentedTrace:
    """A trace written by one thread; without ``rotate_bytes`` and ``rotate_s`` it is one file.

    With ``resume`` it continues the existing trace: torn files are repaired, their records count as ``recorded``, and
    ``meta`` has that trace's epoch. Raises InputError if it cannot be written, or does not continue the existing trace.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: Meta,
        *,
        rotate_bytes: int | None = None,
        rotate_s: float | None = None,
        overwrite: bool = False,
        resume: bool = False,
        keep_s: float | None = None,
        uploads: bool = False,
    ) -> None:
        self.path = Path(path)
        self.meta = meta
        self.recorded = 0
        """Records in the files, those of earlier writers included."""
        self.problem: InputError | None = None
        """Error of the last attempt to write. Null: it succeeded."""
        self.repaired: list[str] = []
        self.manifest = Manifest(epoch_unix_ns=meta.epoch_unix_ns)
        self._rotate_bytes, self._rotate_s = rotate_bytes, rotate_s
        self._rotates = rotate_bytes is not None or rotate_s is not None
        self._keep_s, self._uploads = keep_s, uploads
        self._segment: OpenSegment | None = None
        self._ending = False
        """The open segment's stream has ended; its last bytes, its name or its manifest entry are missing."""
        self._manifest_is_old = False
        self._number = 0
        self._closed = False
        self._taken = 0
        """Records taken, in the files or not."""
        self._lost: list[LostFile] = []
        if not (resume and self._resume()):
            self._start_new(overwrite=overwrite)

    # What the recorder calls.

    @property
    def failing(self) -> bool:
        return self._segment is None or self._ending or self._segment.file.failing

    @property
    def segments(self) -> int:
        if not self._rotates:
            return 1
        return len(self.manifest.segments) + (self._segment is not None)

    @property
    def deleted(self) -> int:
        """Segments that retention has deleted; their records count as recorded."""
        return sum(segment.deleted for segment in self.manifest.segments)

    def write(self, record: Record) -> None:
        """Take a record; raises InputError only if it was refused."""
        segment = self._segment
        if segment is None or self.failing:
            raise self.problem or InputError(f"{self.path}: cannot write; expected room for the trace")
        segment.take(encode_record(record), record.arrival_ms)
        self._taken += 1

    def flush(self) -> bool:
        """Write all records taken to the files; False if the disk refuses, see ``problem``."""
        self.replace_lost_file()
        try:
            self._mend_state()
            assert self._segment is not None
            self._segment.compress()
            self._segment.file.sync()
        except InputError as error:
            self.problem = error
            return False
        self.problem = None
        self.recorded = self._taken
        return True

    def replace_lost_file(self) -> None:
        """Close the open file if another process deleted, moved or changed it: the next flush begins a new one."""
        segment = self._segment
        if segment is None or segment.file.is_unchanged():
            return
        if self._ending and not self.path.parent.exists():
            return  # a file system that is away: the segment gets its name when that is back
        segment.file.set_aside()
        self._segment, self._ending, self._manifest_is_old = None, False, self._rotates
        self._taken -= segment.records
        self.recorded = self._taken
        self._lost.append(LostFile(segment.file.path, segment.inherited, segment.records))
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def lost_files(self) -> list[LostFile]:
        """Return the files that were lost since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def rotate_if_due(self) -> bool:
        segment = self._segment
        if segment is None or self._ending or not self._is_due(segment):
            return False
        try:
            self._end_segment()
            self.replace_lost_file()
            self._mend_state()
        except InputError as error:
            self.problem = error
        return True

    def delete_expired(self) -> list[str]:
        """Delete closed segments of the age of ``keep_s``; return their names."""
        gone: list[str] = []
        if self._keep_s is None:
            return gone
        with contextlib.suppress(OSError):  # others deleted one meanwhile: the next rotation looks again
            for segment in expired_segments(
                self.manifest.segments, self.path.parent, self._keep_s, uploads=self._uploads
            ):
                self.path.with_name(segment.name).unlink()
                gone.append(segment.name)
        self._replace_listed(gone, deleted=True)
        return gone

    def change_meta(self, meta: Meta) -> None:
        self.replace_lost_file()
        self.meta = msgspec.structs.replace(meta, epoch_unix_ns=self.meta.epoch_unix_ns)
        if self._segment is None or self._ending:
            return  # the next segment starts with it
        if self._rotates and self._segment.records:
            with contextlib.suppress(InputError):
                self._end_segment()
        else:
            self._segment.compress()
            self._segment.file.add(encode_meta(self.meta))

    def close(self) -> bool:
        if self._closed:
            return self.recorded == self._taken
        self._closed = True
        self.replace_lost_file()
        segment = self._segment
        try:
            if self._rotates and segment is not None and not segment.records and self.manifest.segments:
                segment.file.abandon()
                part_path(segment.path).unlink(missing_ok=True)
                self._segment = None
            elif segment is not None and not self._ending:
                self._end_segment()
            self._finish_ending()
        except InputError as error:
            self.problem = error
            self._keep_what_is_whole()
            return self.recorded == self._taken
        self.recorded = self._taken
        with contextlib.suppress(InputError):
            self._save_manifest()
        return True

    def mark_uploaded(self, name: str, where: str) -> None:
        self._replace_listed([name], uploaded=where)

    def last_records(self, count: int) -> Iterator[Record]:
        """Yield at least the last ``count`` records of closed files, in order; fewer if there are fewer."""
        if not self._rotates:
            yield from records_of(self.path, skipped=self.recorded - count)
            return
        wanted: list[Segment] = []
        for segment in reversed(self.manifest.segments):
            if sum(segment.records for segment in wanted) < count:
                wanted.insert(0, segment)
        for segment in wanted:
            if (path := self.path.with_name(segment.name)).exists():
                yield from records_of(path)

    def check_integrity(self) -> None:
        assert self.recorded <= self._taken
        assert self._segment is not None or not self._ending
        if not self._closed:
            held = sum(segment.records for segment in self.manifest.segments)
            assert held + (self._segment.records if self._segment is not None else 0) == self._taken

    # Segments, one after another.

    def _is_due(self, segment: OpenSegment) -> bool:
        if not self._rotates or not segment.records:
            return False
        if self._rotate_bytes is not None and segment.file.size >= self._rotate_bytes:
            return True
        return self._rotate_s is not None and time.monotonic() - segment.first_at >= self._rotate_s

    def _open(self, *, overwrite: bool = False) -> OpenSegment:
        """Begin the next segment, or the trace's one file."""
        if self._rotates:
            path = segment_path(self.path, self._number + 1)
            file = new_trace_file(part_path(path), overwrite=True, name=path.name)
            self._number += 1
        else:
            path = self.path
            file = new_trace_file(path, overwrite=overwrite)
        self._segment = OpenSegment(file, path)
        file.add(encode_meta(self.meta))
        return self._segment

    def _end_segment(self) -> None:
        """End the stream of the open segment; ``_finish_ending`` writes the rest that the disk refuses."""
        assert self._segment is not None
        self._segment.compress()
        self._ending = True
        self._segment.file.finish()

    def _mend_state(self) -> None:
        """Complete interrupted work, up to an open segment; raises InputError if the disk still refuses."""
        self._finish_ending()
        self._save_manifest()
        if self._segment is None:
            self._open().file.sync()

    def _finish_ending(self) -> None:
        """Close an ended segment: all of it on disk, under its name, in the manifest."""
        if not self._ending or self._segment is None:
            return
        segment = self._segment
        segment.file.drain()
        segment.file.make_durable()
        if self._rotates:
            try:
                rename_durably(part_path(segment.path), segment.path)
            except OSError as error:
                raise InputError(f"{segment.path}: {error.strerror or error}; expected a writable folder") from error
        self._segment, self._ending = None, False
        segment.file.abandon()
        self.recorded = self._taken
        if self._rotates:
            self.manifest.segments.append(segment.listed())
            self._manifest_is_old = True

    def _replace_listed(self, names: Sequence[str], **changes: object) -> None:
        if not names:
            return
        self.manifest.segments = [
            msgspec.structs.replace(one, **changes) if one.name in names else one for one in self.manifest.segments
        ]
        self._manifest_is_old = True
        with contextlib.suppress(InputError):
            self._save_manifest()

    def _save_manifest(self) -> None:
        if not self._rotates or not self._manifest_is_old:
            return
        path = manifest_path(self.path)
        try:
            write_manifest(path, self.manifest)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}; expected room for the manifest") from error
        self._manifest_is_old = False

    def _keep_what_is_whole(self) -> None:
        """Cut the file after its last complete record when the disk refuses to the end, and count its records."""
        segment = self._segment
        if segment is None:
            return
        segment.file.abandon()
        self._segment = None
        path = part_path(segment.path) if self._rotates else segment.path
        with contextlib.suppress(InputError):
            whole = repair(path).records
            self.recorded = self._taken - segment.records + whole if self._rotates else whole
        if self._rotates:
            with contextlib.suppress(InputError, OSError):
                rename_durably(path, segment.path)
                self.manifest.segments.append(described(segment.path))
                self._manifest_is_old = True
                self._save_manifest()

    # How a trace begins, and begins again.

    def _start_new(self, *, overwrite: bool) -> None:
        if self._rotates:
            there = segments_there(self.path)
            if there and not overwrite:
                raise InputError(
                    f"{self.path}: {len(there)} segments are there already, from {there[0].name} on; "
                    "expected none, --resume or --overwrite"
                )
            for path in (*there, manifest_path(self.path)):
                path.unlink(missing_ok=True)
            self._manifest_is_old = True
            self._save_manifest()
        file = self._open(overwrite=overwrite).file
        try:
            file.sync()
        except InputError:
            file.abandon()
            raise

    def _resume(self) -> bool:
        found = (resume_segments if self._rotates else resume_file)(self.path, self.meta)
        if found is None:
            return False
        self.meta, self.repaired, self.recorded, self._taken = found.meta, found.repaired, found.records, found.records
        if self._rotates:
            self.manifest, self._number, self._manifest_is_old = found.manifest, found.number, True
            self.flush()
        else:
            self._segment = OpenSegment(append_to(self.path), self.path, records=found.records, inherited=found.records)
            if found.says_something_new:
                self._segment.file.add(encode_meta(self.meta))
        return True
