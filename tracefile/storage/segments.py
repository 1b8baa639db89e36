"""Segments of a trace: consecutive files on one clock, each a complete trace, and their manifest.

The segments of ``captured.jsonl.zst`` are ``captured-000001.jsonl.zst`` …, listed in ``captured.segments.json``.
A segment that is being written, or whose writer was killed, is not listed and has the suffix ``.part``.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tracefile.records.decoding import NOT_JSON
from tracefile.records.errors import InputError
from tracefile.storage.durable import replace_durably
from tracefile.storage.lines import LineReader
from tracefile.storage.remote import given_path, is_url, names_at, read_small

MANIFEST_SUFFIX = ".segments.json"
MANIFEST_SCHEMA = "kvtape-segments/1"
PART_SUFFIX = ".part"
TRACE_SUFFIXES = (".jsonl", ".json", ".gz", ".zst", ".zstd")

MOST_NAME_BYTES = 255

_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{6,})(?P<suffix>(\.jsonl?)?(\.(gz|zst|zstd))?)$")


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A closed segment in the manifest."""

    name: str
    records: int
    bytes: int
    first_arrival_ms: float | None
    """Earliest arrival. Null: no record has an arrival."""
    last_arrival_ms: float | None
    digest: str
    """``trace_digest`` of the segment."""
    uploaded: str | None = None
    """URL of the uploaded copy. Null: not uploaded."""
    deleted: bool = False
    """``tap --keep`` deleted the local file; the manifest still lists it."""


class Manifest(msgspec.Struct, kw_only=True):
    """Content of ``NAME.segments.json``."""

    schema: str = MANIFEST_SCHEMA
    epoch_unix_ns: int | None = None
    """Wall clock at t = 0 of all segments."""
    segments: list[Segment] = []
    """In order, including segments whose files were moved or deleted."""


def manifest_path(trace: str | os.PathLike[str]) -> Path:
    """Return the path of a trace's manifest."""
    stem, _ = _split_name(Path(trace))
    return Path(trace).with_name(stem + MANIFEST_SUFFIX)


def segment_path(trace: str | os.PathLike[str], number: int) -> Path:
    """Return the path of segment ``number``, from 1."""
    stem, suffix = _split_name(Path(trace))
    return Path(trace).with_name(f"{stem}-{number:06}{suffix}")


def part_path(segment: Path) -> Path:
    """Return the path of a segment while it is being written."""
    return segment.with_name(segment.name + PART_SUFFIX)


def segment_number(path: Path) -> int:
    """Return the number in a segment's name, with or without ``.part``; 0 for other names."""
    match = _numbered(path)
    return int(match["number"]) if match else 0


def segments_there(trace: str | os.PathLike[str]) -> list[Path]:
    """Return the existing segment files of a trace, in order, ``.part`` included."""
    stem, suffix = _split_name(Path(trace))
    return _numbered_files(Path(trace).parent, stem, suffix)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read a manifest; raises InputError if it is invalid, FileNotFoundError if it does not exist."""
    return decode_manifest(Path(path).read_bytes(), path)


def decode_manifest(content: bytes, path: str | os.PathLike[str]) -> Manifest:
    """Decode a manifest; raises InputError with the path if it is invalid."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except NOT_JSON as error:
        raise InputError(f"{path}: {error}; expected a manifest of segments") from None
    for segment in manifest.segments:
        if not _is_file_name(segment.name):
            raise InputError(f"{path}: segments: name: {segment.name!r}; expected a file's name, without a folder")
    if manifest.schema != MANIFEST_SCHEMA:
        raise InputError(f"{path}: schema: {manifest.schema!r}; this version reads {MANIFEST_SCHEMA!r}")
    return manifest


def _is_file_name(name: str) -> bool:
    """Return whether a name can be a file beside the manifest."""
    return 0 < len(os.fsencode(name)) <= MOST_NAME_BYTES and name not in {".", ".."} and not {"/", "\0"} & set(name)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically and durably."""
    replace_durably(path, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def trace_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the files of a trace in order; raises InputError for a folder with no trace or several."""
    return _members(given_path(path))[0]


def open_lines(path: str) -> LineReader:
    """Open a file of a trace; a ``.part`` segment may have been closed and renamed in the meantime."""
    closed = path.removesuffix(PART_SUFFIX)
    try:
        return LineReader(path)
    except InputError:
        if closed == path or not os.path.exists(closed):
            raise
        return LineReader(closed)


def absent_segments(path: str | os.PathLike[str]) -> list[Segment]:
    """Return the segments in a trace's manifest whose files are missing."""
    return _members(given_path(path))[1]


def _members(given: str) -> tuple[list[str], list[Segment]]:
    """Return the paths of a trace's files, in order, and its missing segments.

    ``given``: path or URL of a file, a folder of segments, their manifest, or the trace's name.
    """
    folder, slash, name = given.rstrip("/").rpartition("/")
    stem = _split_name(Path(name.removesuffix(MANIFEST_SUFFIX)))[0]
    names = [] if name.endswith(MANIFEST_SUFFIX) else names_at(given)
    if names is None:
        return [given], []
    if names or os.path.isdir(given):
        folder, slash, stem = given.rstrip("/"), "/", _only_stem(given, names)
    present = {name for name in names or names_at(folder + slash or ".") or () if _stem(name) == stem}
    manifest = f"{folder}{slash}{stem}{MANIFEST_SUFFIX}"
    content = read_small(manifest)
    listed = [] if content is None else decode_manifest(content, manifest).segments
    if content is None and not present and not is_url(given) and not name.endswith(MANIFEST_SUFFIX):
        return [given], []  # a missing file
    order = {segment.name: index for index, segment in enumerate(listed)}
    members = sorted(present, key=lambda name: (order.get(name, len(order)), segment_number(Path(name)), name))
    if not members:
        raise InputError(f"{given}: all its segments are missing; expected a trace, or a folder of its segments")
    absent = [segment for segment in listed if segment.name not in present]
    return [f"{folder}{slash}{name}" for name in members], absent


def manifests_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the manifests of a trace given by its folder, manifest or name."""
    given = Path(path)
    if given.is_dir():
        return list(given.glob(f"*{MANIFEST_SUFFIX}"))
    return [given if given.name.endswith(MANIFEST_SUFFIX) else manifest_path(given)]


def becomes_segment(output: str | os.PathLike[str], path: str | os.PathLike[str]) -> bool:
    """Return whether a new file ``output`` would be a segment of the trace in the folder ``path``."""
    given, written = Path(path), Path(output)
    with contextlib.suppress(OSError):
        return given.is_dir() and _numbered(written) is not None and given.samefile(written.parent)
    return False


def _only_stem(folder: str, names: Sequence[str]) -> str:
    """Return the name of the trace in a folder of segments; raises InputError for no trace or several."""
    if not names:
        raise InputError(
            f"{folder}: is empty; expected segments: a tap writes the first after it reaches its engine (see its log)"
        )
    stems = {stem for name in names if (stem := _stem(name)) is not None}
    stems |= {name.removesuffix(MANIFEST_SUFFIX) for name in names if name.endswith(MANIFEST_SUFFIX)}
    if not stems:
        raise InputError(f"{folder}: is a directory without segments; expected a trace, or a folder of its segments")
    if len(stems) > 1:
        raise InputError(
            f"{folder}: segments of {' and '.join(sorted(stems))}; expected one trace, or the path of a manifest"
        )
    return stems.pop()


def _stem(name: str) -> str | None:
    """Return the trace name in a segment's name; None: not a segment's name."""
    match = _numbered(Path(name))
    return match["stem"] if match and match["suffix"] else None


def _numbered_files(folder: Path, stem: str, suffix: str | None) -> list[Path]:
    """Return segments by number, a closed segment before a ``.part`` of the same number."""
    files = []
    for file in folder.iterdir() if folder.is_dir() else ():
        name = _numbered(file)
        if name and name["stem"] == stem and suffix in (None, name["suffix"]):
            files.append(file)
    return sorted(files, key=lambda file: (segment_number(file), file.name))


def _numbered(file: Path) -> re.Match[str] | None:
    return _NUMBERED.match(file.name.removesuffix(PART_SUFFIX))


def _split_name(trace: Path) -> tuple[str, str]:
    """Split ``captured.jsonl.zst`` into ``captured`` and ``.jsonl.zst``."""
    stem = trace.name
    while (suffix := os.path.splitext(stem)[1]) in TRACE_SUFFIXES:
        stem = stem.removesuffix(suffix)
    return stem, trace.name[len(stem) :]
