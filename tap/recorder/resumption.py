"""A resumed trace: its files are repaired and counted, and checked to be a trace that this tap continues."""

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
    """State of the existing trace, and the header to continue with."""

    meta: Meta
    """Header of the new writer, on the old one's clock."""
    records: int = 0
    repaired: list[str] = field(default_factory=list)
    says_something_new: bool = False
    """True if the header differs from that of the last records."""
    manifest: Manifest = field(default_factory=Manifest)
    number: int = 0

    def repair(self, path: Path) -> RepairedTrace:
        repaired = repair(path)
        if repaired.torn:
            self.repaired.append(f"{path}: {repaired.records} complete records kept; its torn end was dropped")
        return repaired

    def continue_after(self, before: Meta, path: Path) -> None:
        """Take over a header's clock; raises InputError if later records do not belong under it."""
        self.meta = msgspec.structs.replace(self.meta, epoch_unix_ns=before.epoch_unix_ns)
        self.says_something_new = self.meta != before
        check_continues(before, self.meta, f"--resume {path}")
        if before.tokenizer == "bytes":
            raise InputError(f"--resume {path}: its hashes are of bytes, not of token ids; expected a new file")


def resume_file(path: Path, meta: Meta) -> Resumption | None:
    """Mend the file of a trace; null if there is none, or it is empty. Raises InputError if it is another trace."""
    if not path.exists() or not path.stat().st_size:
        return None
    found = Resumption(meta)
    repaired = found.repair(path)
    if repaired.meta is None:
        return None
    found.continue_after(repaired.meta, path)
    found.records = repaired.records
    return found


def resume_segments(path: Path, meta: Meta) -> Resumption | None:
    """Close and list the open segment of the last writer; null if there is no such trace."""
    found = Resumption(meta)
    there = segments_there(path)
    with contextlib.suppress(FileNotFoundError):
        found.manifest = read_manifest(manifest_path(path))
    known = {segment.name for segment in found.manifest.segments}
    if not there and not known:
        return None
    numbers = [segment_number(file) for file in (*there, *map(Path, known))]
    found.number = max(numbers)
    try:
        for file in there:
            if file.name not in known:
                _take_in(found, file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a trace to go on with") from error
    found.records = sum(segment.records for segment in found.manifest.segments)
    _continue_segments(found, path)
    return found


def described(path: Path) -> Segment:
    arrivals = [record.arrival_ms for record in records_of(path)]
    known = [arrival for arrival in arrivals if arrival is not None]
    return Segment(
        name=path.name,
        records=len(arrivals),
        bytes=path.stat().st_size,
        first_arrival_ms=min(known, default=None),
        last_arrival_ms=max(known, default=None),
        digest=trace_digest(path),
    )


def records_of(path: Path, *, skipped: int = 0) -> Iterator[Record]:
    """Yield the records of a whole file of ours; the first ``skipped`` are not decoded."""
    decoder = KvtapeDecoder(Meta())
    with LineReader(path) as lines:
        for line in lines:
            if is_header(line):
                continue
            skipped -= 1
            if skipped < 0:
                yield decoder.decode_without_faults(line, f"{path}:{lines.number}")


def _take_in(found: Resumption, path: Path) -> None:
    if not found.repair(path).records:
        path.unlink()
        return
    named = path.with_name(path.name.removesuffix(PART_SUFFIX))
    if path != named:
        rename_durably(path, named)
    found.manifest.segments.append(described(named))


def _continue_segments(found: Resumption, path: Path) -> None:
    files = [path.with_name(segment.name) for segment in reversed(found.manifest.segments)]
    last = next((file for file in files if file.exists()), None)
    if last is not None:
        with open_trace(last) as reader:
            found.continue_after(reader.meta, last)
    elif files:
        found.meta = msgspec.structs.replace(found.meta, epoch_unix_ns=found.manifest.epoch_unix_ns)
    found.manifest.epoch_unix_ns = found.meta.epoch_unix_ns
