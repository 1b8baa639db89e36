"""Trace writer of the recorder: one file, or segments rotated by size and age; resumes after a crash.

Records counted as recorded are in the files. On a full disk, new records are refused and no accepted record is lost:
every flush retries, and recording continues once there is space.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tap.recorder.opensegment import LostFile, OpenSegment
from tap.recorder.resumption import records_of, resume_file, resume_segments, segment_of
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
"""Most segments deleted per rotation, so that a clock jump cannot delete the complete trace."""


def expired_segments(
    segments: Sequence[Segment],
    folder: Path,
    keep_s: float,
    *,
    uploads: bool = False,
) -> list[Segment]:
    """Return the closed segments to delete by ``--keep``, oldest first.

    A segment expires only by two clocks: the trace's clock, which is monotonic while a tap runs, and the file's
    modification time. The newest closed segment, segments without write permission (``chmod a-w``) and segments that
    wait for their upload are kept.
    """

    def is_old(segment: Segment, newest: Segment) -> bool:
        last_ms, now_ms = segment.last_arrival_ms, newest.last_arrival_ms
        if last_ms is not None and now_ms is not None and now_ms - last_ms <= keep_s * 1000:
            return False
        about = (folder / segment.name).stat()
        return bool(about.st_mode & stat.S_IWUSR) and time.time() - about.st_mtime > keep_s

    existing = [segment for segment in segments if not segment.deleted and (folder / segment.name).is_file()]
    free = [segment for segment in existing[:-1] if segment.uploaded is not None or not uploads]
    return [segment for segment in free if is_old(segment, existing[-1])][:AGED_AT_ONCE]


class SegmentedTrace:
    """Trace written by one thread; without ``rotate_bytes`` and ``rotate_s`` a single file.

    With ``resume``, the existing trace is continued: truncated files are repaired, their records count as ``recorded``,
    and ``meta`` has the epoch of the existing trace. Raises InputError if the trace cannot be written or continued.
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
        """Records in the files, records of earlier runs included."""
        self.problem: InputError | None = None
        """Error of the last write. None: it succeeded."""
        self.repaired: list[str] = []
        self.manifest = Manifest(epoch_unix_ns=meta.epoch_unix_ns)
        self._rotate_bytes, self._rotate_s = rotate_bytes, rotate_s
        self._rotates = rotate_bytes is not None or rotate_s is not None
        self._keep_s, self._uploads = keep_s, uploads
        self._segment: OpenSegment | None = None
        self._ending = False
        """True: the stream of the open segment has ended, but its last bytes, rename or manifest entry are missing."""
        self._manifest_is_old = False
        self._number = 0
        self._closed = False
        self._accepted = 0
        """Accepted records, in the files or not."""
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
        """Number of segments deleted by ``--keep``; their records count as recorded."""
        return sum(segment.deleted for segment in self.manifest.segments)

    def write(self, record: Record) -> None:
        """Accept a record; raises InputError only if the record is refused."""
        segment = self._segment
        if segment is None or self.failing:
            raise self.problem or InputError(f"{self.path}: cannot write; expected disk space for the trace")
        segment.add_line(encode_record(record), record.arrival_ms)
        self._accepted += 1

    def flush(self) -> bool:
        """Write all accepted records to the files; return False if the write fails (``problem``)."""
        self.replace_lost_file()
        try:
            self._repair_state()
            assert self._segment is not None
            self._segment.compress()
            self._segment.file.sync()
        except InputError as error:
            self.problem = error
            return False
        self.problem = None
        self.recorded = self._accepted
        return True

    def replace_lost_file(self) -> None:
        """Close the open file if another process deleted, moved or changed it; the next flush starts a new file."""
        segment = self._segment
        if segment is None or segment.file.is_unchanged():
            return
        if self._ending and not self.path.parent.exists():
            return  # the file system is unmounted: the segment is renamed after the next mount
        segment.file.set_aside()
        self._segment, self._ending, self._manifest_is_old = None, False, self._rotates
        self._accepted -= segment.records
        self.recorded = self._accepted
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
            self._repair_state()
        except InputError as error:
            self.problem = error
        return True

    def delete_expired(self) -> list[str]:
        """Delete closed segments older than ``keep_s``; return their names."""
        deleted_names: list[str] = []
        if self._keep_s is None:
            return deleted_names
        with contextlib.suppress(OSError):  # another process deleted a segment: the next rotation retries
            for segment in expired_segments(
                self.manifest.segments, self.path.parent, self._keep_s, uploads=self._uploads
            ):
                self.path.with_name(segment.name).unlink()
                deleted_names.append(segment.name)
        self._replace_listed(deleted_names, deleted=True)
        return deleted_names

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
            return self.recorded == self._accepted
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
            self._truncate_to_complete_records()
            return self.recorded == self._accepted
        self.recorded = self._accepted
        with contextlib.suppress(InputError):
            self._save_manifest()
        return True

    def mark_uploaded(self, name: str, where: str) -> None:
        self._replace_listed([name], uploaded=where)

    def last_records(self, count: int) -> Iterator[Record]:
        """Yield at least the last ``count`` records of closed files, in order, or all if there are fewer."""
        if not self._rotates:
            yield from records_of(self.path, skipped=self.recorded - count)
            return
        newest: list[Segment] = []
        for segment in reversed(self.manifest.segments):
            if sum(segment.records for segment in newest) < count:
                newest.insert(0, segment)
        for segment in newest:
            if (path := self.path.with_name(segment.name)).exists():
                yield from records_of(path)

    def check_integrity(self) -> None:
        assert self.recorded <= self._accepted
        assert self._segment is not None or not self._ending
        if not self._closed:
            closed = sum(segment.records for segment in self.manifest.segments)
            assert closed + (self._segment.records if self._segment is not None else 0) == self._accepted

    # Segments, one after another.

    def _is_due(self, segment: OpenSegment) -> bool:
        if not self._rotates or not segment.records:
            return False
        if self._rotate_bytes is not None and segment.file.size >= self._rotate_bytes:
            return True
        return self._rotate_s is not None and time.monotonic() - segment.first_at >= self._rotate_s

    def _open(self, *, overwrite: bool = False) -> OpenSegment:
        """Open the next segment, or the single file of the trace."""
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
        """End the stream of the open segment; ``_finish_ending`` retries failed writes."""
        assert self._segment is not None
        self._segment.compress()
        self._ending = True
        self._segment.file.finish()

    def _repair_state(self) -> None:
        """Finish interrupted writes and open a segment; raises InputError if the write fails again."""
        self._finish_ending()
        self._save_manifest()
        if self._segment is None:
            self._open().file.sync()

    def _finish_ending(self) -> None:
        """Close an ended segment: sync the file, rename it and list it in the manifest."""
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
        self.recorded = self._accepted
        if self._rotates:
            self.manifest.segments.append(segment.listed())
            self._manifest_is_old = True

    def _replace_listed(self, names: Sequence[str], **changes: object) -> None:
        if not names:
            return
        self.manifest.segments = [
            msgspec.structs.replace(segment, **changes) if segment.name in names else segment
            for segment in self.manifest.segments
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
            raise InputError(f"{path}: {error.strerror or error}; expected disk space for the manifest") from error
        self._manifest_is_old = False

    def _truncate_to_complete_records(self) -> None:
        """Truncate the file after its last complete record if writes fail to the end, and count its records."""
        segment = self._segment
        if segment is None:
            return
        segment.file.abandon()
        self._segment = None
        path = part_path(segment.path) if self._rotates else segment.path
        with contextlib.suppress(InputError):
            records = repair(path).records
            self.recorded = self._accepted - segment.records + records if self._rotates else records
        if self._rotates:
            with contextlib.suppress(InputError, OSError):
                rename_durably(path, segment.path)
                self.manifest.segments.append(segment_of(segment.path))
                self._manifest_is_old = True
                self._save_manifest()

    # Start and resumption of a trace.

    def _start_new(self, *, overwrite: bool) -> None:
        if self._rotates:
            existing = segments_there(self.path)
            if existing and not overwrite:
                raise InputError(
                    f"{self.path}: {len(existing)} segments exist already, from {existing[0].name} on; "
                    "expected none, --resume or --overwrite"
                )
            for path in (*existing, manifest_path(self.path)):
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
        resumption = (resume_segments if self._rotates else resume_file)(self.path, self.meta)
        if resumption is None:
            return False
        self.meta, self.repaired = resumption.meta, resumption.repaired
        self.recorded = self._accepted = records = resumption.records
        if self._rotates:
            self.manifest, self._number, self._manifest_is_old = resumption.manifest, resumption.number, True
            self.flush()
        else:
            self._segment = OpenSegment(append_to(self.path), self.path, records=records, inherited=records)
            if resumption.header_changed:
                self._segment.file.add(encode_meta(self.meta))
        return True
