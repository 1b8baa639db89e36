"""Resumption of a trace: repairs and counts its files, and checks that this tap may continue the trace."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tracefile.files.digest import trace_digest
from tracefile.files.reading import check_continues, open_trace
from tracefile.records.decoding import KvtapeDecoder, is_header
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.storage.durable import rename_durably
from tracefile.storage.lines import LineReader
from tracefile.storage.repair import RepairedTrace, repair
from tracefile.storage.segments import (
    PART_SUFFIX,
    Manifest,
    Segment,
    manifest_path,
    read_manifest,
    segment_number,
    segments_there,
)


@dataclass(slots=True)
class Resumption:
    """State of the existing trace and the header of the next records."""

    meta: Meta
    """Header of this run, with the epoch of the existing trace."""
    records: int = 0
    repaired: list[str] = field(default_factory=list)
    header_changed: bool = False
    """True if the header differs from the header of the last records."""
    manifest: Manifest = field(default_factory=Manifest)
    number: int = 0

    def repair(self, path: Path) -> RepairedTrace:
        repaired = repair(path)
        if repaired.torn:
            self.repaired.append(f"{path}: {repaired.records} complete records kept, truncated end dropped")
        return repaired

    def continue_after(self, before: Meta, path: Path) -> None:
        """Adopt the epoch of the header ``before``; raises InputError if the header is of another kind of trace."""
        self.meta = msgspec.structs.replace(self.meta, epoch_unix_ns=before.epoch_unix_ns)
        self.header_changed = self.meta != before
        check_continues(before, self.meta, f"--resume {path}")
        if before.tokenizer == "bytes":
            raise InputError(f"--resume {path}: its block hashes are of bytes, not of token ids; expected a new file")


def resume_file(path: Path, meta: Meta) -> Resumption | None:
    """Repair the file of a trace; None: no file, or empty. Raises InputError if the trace cannot be continued."""
    if not path.exists() or not path.stat().st_size:
        return None
    resumption = Resumption(meta)
    repaired = resumption.repair(path)
    if repaired.meta is None:
        return None
    resumption.continue_after(repaired.meta, path)
    resumption.records = repaired.records
    return resumption


def resume_segments(path: Path, meta: Meta) -> Resumption | None:
    """Close and list the open segment of the previous run; None: no trace."""
    resumption = Resumption(meta)
    existing = segments_there(path)
    with contextlib.suppress(FileNotFoundError):
        resumption.manifest = read_manifest(manifest_path(path))
    listed = {segment.name for segment in resumption.manifest.segments}
    if not existing and not listed:
        return None
    numbers = [segment_number(file) for file in (*existing, *map(Path, listed))]
    resumption.number = max(numbers)
    try:
        for file in existing:
            if file.name not in listed:
                _close_segment(resumption, file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a trace to continue") from error
    resumption.records = sum(segment.records for segment in resumption.manifest.segments)
    _continue_segments(resumption, path)
    return resumption


def segment_of(path: Path) -> Segment:
    arrivals = [record.arrival_ms for record in records_of(path)]
    present = [arrival for arrival in arrivals if arrival is not None]
    return Segment(
        name=path.name,
        records=len(arrivals),
        bytes=path.stat().st_size,
        first_arrival_ms=min(present, default=None),
        last_arrival_ms=max(present, default=None),
        digest=trace_digest(path),
    )


def records_of(path: Path, *, skipped: int = 0) -> Iterator[Record]:
    """Yield the records of a trace file written by the tap; the first ``skipped`` are not decoded."""
    decoder = KvtapeDecoder(Meta())
    with LineReader(path) as lines:
        for line in lines:
            if is_header(line):
                continue
            skipped -= 1
            if skipped < 0:
                yield decoder.decode_without_faults(line, f"{path}:{lines.number}")


def _close_segment(resumption: Resumption, path: Path) -> None:
    if not resumption.repair(path).records:
        path.unlink()
        return
    named = path.with_name(path.name.removesuffix(PART_SUFFIX))
    if path != named:
        rename_durably(path, named)
    resumption.manifest.segments.append(segment_of(named))


def _continue_segments(resumption: Resumption, path: Path) -> None:
    files = [path.with_name(segment.name) for segment in reversed(resumption.manifest.segments)]
    last = next((file for file in files if file.exists()), None)
    if last is not None:
        with open_trace(last) as reader:
            resumption.continue_after(reader.meta, last)
    elif files:
        resumption.meta = msgspec.structs.replace(resumption.meta, epoch_unix_ns=resumption.manifest.epoch_unix_ns)
    resumption.manifest.epoch_unix_ns = resumption.meta.epoch_unix_ns
