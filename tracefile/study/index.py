"""``tracefile ls``: the traces of a store, from manifests, headers and footers; no body is read."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from tracefile.commandline.progress import counted
from tracefile.files.columns import read_footer, span_of
from tracefile.files.reading import open_trace
from tracefile.parquet.layout import is_parquet
from tracefile.records.errors import InputError
from tracefile.records.extras import load_extra
from tracefile.records.schema import Meta
from tracefile.storage.remote import files_under
from tracefile.storage.segments import (
    MANIFEST_SUFFIX,
    PART_SUFFIX,
    Manifest,
    decode_manifest,
    manifest_at,
    segment_number,
    trace_of,
)

SIDE_FILES = (".engine.jsonl", ".validations.jsonl", ".summary.json")


@dataclass(slots=True)
class IndexedFile:
    """A file of a trace. Null: neither the manifest nor the file's own header and footer says."""

    path: str
    trace: str
    """Path of the whole: the folder and the name before the segment's number."""
    bytes: int
    requests: int | None = None
    from_unix_s: float | None = None
    """First arrival."""
    until_unix_s: float | None = None
    """Last arrival, or the next segment's first."""
    key_id: str | None = None
    engine: str | None = None
    model: str | None = None
    open: bool = False
    """It is being written, or a killed writer left it."""

    def overlaps(self, from_s: float, until_s: float) -> bool:
        """Return whether arrivals may lie in the span: one without times always may."""
        begins = self.from_unix_s is None or self.from_unix_s < until_s
        return begins and (self.until_unix_s is None or self.until_unix_s >= from_s)


def index_store(path: str) -> list[IndexedFile]:
    """Return the files of all traces below a folder or URL, by trace and number. InputError: there is none."""
    sizes = dict(files_under(path))
    named = _named(sizes)
    found = [
        file
        for trace, files in groupby(counted(named, "files looked at"), key=lambda pair: pair[0])
        for file in _index_trace(trace, [file for _, file in files], sizes)
    ]
    if not found:
        raise InputError(f"{path}: no trace is there; expected a folder of traces")
    return found


def traces_below(path: str) -> list[str]:
    """Return what each trace below a folder or URL is read by: its file, or its manifest. InputError: none is there."""
    sizes = dict(files_under(path))
    whole = dict(_named(sizes))
    manifests = (f"{trace}{MANIFEST_SUFFIX}" for trace in whole)
    found = [
        at if at in sizes or segment_number(Path(file)) else file  # a manifest that is lost still names the segments
        for at, file in zip(manifests, whole.values(), strict=True)
    ]
    if not found:
        raise InputError(f"{path}: no trace is there; expected a folder of traces")
    return found


def _named(files: Iterable[str]) -> list[tuple[str, str]]:
    """Return files that are traces by their names, each after its trace's."""
    return sorted(
        (trace, file) for file in files if (trace := trace_of(file)) is not None and not file.endswith(SIDE_FILES)
    )


def _index_trace(trace: str, files: Sequence[str], sizes: dict[str, int]) -> Iterator[IndexedFile]:
    """Index a trace's files: the first and last by their headers, those between by the manifest alone."""
    manifest = Manifest()
    if (listed_at := f"{trace}{MANIFEST_SUFFIX}") in sizes:
        manifest = decode_manifest(manifest_at(listed_at), listed_at)
    listed = {segment.name: segment for segment in manifest.segments}
    indexed = []
    for place, file in enumerate(files):
        if is_parquet(file):
            load_extra("pyarrow", where=f"{file}: Parquet ")
        one = IndexedFile(file, trace, sizes[file], open=file.endswith(PART_SUFFIX))
        segment = listed.get(os.path.basename(file))
        if segment is not None:
            one.requests = segment.records
            one.from_unix_s = _unix_s(manifest.epoch_unix_ns, segment.first_arrival_ms)
            one.until_unix_s = _unix_s(manifest.epoch_unix_ns, segment.last_arrival_ms)
        if segment is None or place in (0, len(files) - 1):
            try:
                _read_ends(one)
            except InputError:
                continue  # no trace of a known format
        indexed.append(one)
    for before, after in pairwise(indexed):
        before.until_unix_s = after.from_unix_s if before.until_unix_s is None else before.until_unix_s
        if after.key_id is None:
            after.key_id, after.engine, after.model = before.key_id, before.engine, before.model
    yield from indexed


def _read_ends(one: IndexedFile) -> None:
    """Fill in a file's header, its first arrival, and what a footer says."""
    with open_trace(one.path) as reader:
        meta, first_ms, last_ms = reader.meta, None, None
        if is_parquet(one.path):
            one.requests = read_footer(one.path).records
            first_ms, last_ms = span_of(one.path)
        elif one.from_unix_s is None:
            first_ms = next((record.arrival_ms for record in reader), None)
    one.from_unix_s = one.from_unix_s or _unix_s(meta.epoch_unix_ns, first_ms)
    one.until_unix_s = one.until_unix_s or _unix_s(meta.epoch_unix_ns, last_ms)
    one.key_id = None if meta.hash is None else meta.hash.key_id
    one.model, one.engine = meta.model, _engine_words(meta)


def _engine_words(meta: Meta) -> str | None:
    engine = meta.engine
    return None if engine is None else " ".join(filter(None, (engine.name, engine.version))) or None


def _unix_s(epoch_unix_ns: int | None, at_ms: float | None) -> float | None:
    return None if epoch_unix_ns is None or at_ms is None else epoch_unix_ns / 1e9 + at_ms / 1e3


@dataclass(frozen=True, slots=True)
class IndexedTrace:
    """Sums over the files of one trace."""

    trace: str
    files: int
    requests: int
    """In files that tell."""
    uncounted: int
    """Files that do not."""
    bytes: int
    from_unix_s: float | None
    until_unix_s: float | None
    key_ids: tuple[str, ...]
    engines: tuple[str, ...]


def by_trace(files: Sequence[IndexedFile]) -> list[IndexedTrace]:
    """Return the sums by trace."""
    return [_summed(trace, list(parts)) for trace, parts in groupby(files, key=attrgetter("trace"))]


def _summed(trace: str, files: Sequence[IndexedFile]) -> IndexedTrace:
    begins = [file.from_unix_s for file in files if file.from_unix_s is not None]
    ends = [file.until_unix_s for file in files if file.until_unix_s is not None]
    return IndexedTrace(
        trace=trace,
        files=len(files),
        requests=sum(file.requests or 0 for file in files),
        uncounted=sum(file.requests is None for file in files),
        bytes=sum(file.bytes for file in files),
        from_unix_s=min(begins, default=None),
        until_unix_s=max(ends, default=None),
        key_ids=tuple(sorted({file.key_id for file in files if file.key_id is not None})),
        engines=tuple(sorted({file.engine for file in files if file.engine is not None})),
    )


def time_words(unix_s: float | None) -> str:
    """Return a moment in UTC to the minute."""
    return "–" if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")


def index_object(files: Sequence[IndexedFile]) -> dict[str, Any]:
    """Return the object of ``ls --json``."""
    return {"traces": [asdict(trace) for trace in by_trace(files)], "files": msgspec.to_builtins(files)}
