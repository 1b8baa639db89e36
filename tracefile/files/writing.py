"""Trace writer: a header, then records in finish order; a killed writer loses at most one second of records."""

import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from tracefile.records.encoding import encode_meta, encode_record
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.storage.appending import append_to, begin_replacement, new_atomic_file, new_trace_file
from tracefile.storage.output import is_replaceable, mode_like, refuse_inputs

FLUSH_INTERVAL_S = 1.0


class TraceWriter:
    """Appends records to a trace; a suffix ``.gz`` or ``.zst`` selects compression. Thread-safe.

    The header is on disk when the constructor returns. A background thread flushes records every second; ``flush`` and
    ``close`` flush too. If the disk refuses writes (full, gone), the writer buffers accepted records and retries with
    each record: an error from ``write`` means that this record was not accepted. The file never has a torn line in its
    middle.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: Meta,
        *,
        overwrite: bool = False,
        append: bool = False,
        atomic: bool = False,
        mode: int = 0o666,
    ) -> None:
        """``append``: continue a complete trace (see ``tracefile.storage.repair``) on the same clock.

        ``atomic``: write a temporary file and rename it at the end, unless an error ends the ``with`` block.
        ``mode``: permissions of a new atomic file.
        """
        self.path = os.fspath(path)
        if self.path.endswith(".parquet"):
            raise InputError(f"{self.path}: this writer writes JSON Lines; expected .jsonl, .jsonl.gz or .jsonl.zst")
        self.count = 0
        self._lock = threading.Lock()
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._meta = meta
        header = encode_meta(meta)
        self._atomic = atomic
        if append:
            self._file = append_to(path)
        elif atomic:
            self._file = new_atomic_file(path, overwrite=overwrite, mode=mode)
        else:
            self._file = new_trace_file(path, overwrite=overwrite)
        try:
            self._file.add(header)
            self.flush()
        except BaseException:
            self._file.abandon()
            raise
        self._flusher = threading.Thread(target=self._flush_each_second, name="trace-flush", daemon=True)
        self._flusher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._atomic:
            self._end_flusher()
            self._file.abandon()
        else:
            self.close()

    def write(self, record: Record) -> None:
        """Write a record; raises InputError if and only if the record was not accepted."""
        line = encode_record(record)
        with self._lock:
            self._add(line)
            self.count += 1

    def change_meta(self, meta: Meta) -> None:
        """Write a header for the next records if it differs; clock, block size and hashes must not change."""
        with self._lock:
            if meta is not self._meta and meta != self._meta:
                self._add(encode_meta(meta))
            self._meta = meta

    def flush(self) -> None:
        """Write all accepted records to the file; raises InputError if the disk refuses them."""
        with self._lock:
            self._dirty.clear()
            self._file.sync()

    def close(self) -> None:
        """Flush, end the compressed stream and close the file; idempotent."""
        if self._closing.is_set():
            return
        self._end_flusher()
        try:
            with self._lock:
                self._file.finish()
        finally:
            self._file.abandon()

    def _end_flusher(self) -> None:
        self._closing.set()
        self._dirty.set()
        self._flusher.join()

    def _add(self, line: bytes) -> None:
        if self._file.failing:
            self._file.drain()
        self._file.add(line)
        if not self._dirty.is_set():
            self._dirty.set()

    def _flush_each_second(self) -> None:
        while not self._closing.is_set():
            self._dirty.wait()
            if self._closing.wait(FLUSH_INTERVAL_S):
                return
            try:
                self.flush()
            except InputError:
                self._dirty.set()


def _output(path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]) -> str | os.PathLike[str]:
    """Return the output path, stdout for ``-``; raises InputError if it is an input."""
    path = "/dev/stdout" if os.fspath(path) == "-" else path
    refuse_inputs(path, inputs)
    return path


def check_new(
    path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]], overwrite: bool = False
) -> None:
    """Raise InputError, before a long run, if ``new_writer`` would refuse the path after it."""
    path = _output(path, inputs)
    if is_replaceable(path):
        begin_replacement(path, overwrite=overwrite).abandon()


def new_writer(
    path: str | os.PathLike[str], meta: Meta, *, inputs: Iterable[str | os.PathLike[str]], overwrite: bool = False
) -> TraceWriter:
    """Return a writer of a complete trace; ``-``: to stdout.

    The file is renamed to its name when it is complete. Raises InputError if it is one of the ``inputs``.
    """
    path = _output(path, inputs)
    return TraceWriter(path, meta, overwrite=overwrite, atomic=is_replaceable(path), mode=mode_like(inputs))


def write_lines(
    path: str | os.PathLike[str],
    lines: Iterable[bytes],
    *,
    inputs: Iterable[str | os.PathLike[str]],
    overwrite: bool = False,
) -> None:
    """Write lines of another format atomically, compressed by suffix; ``-``: to stdout. Raises InputError."""
    path = _output(path, inputs)
    if is_replaceable(path):
        file = new_atomic_file(path, overwrite=overwrite, mode=mode_like(inputs))
    else:
        file = new_trace_file(path, overwrite=overwrite)
    try:
        for line in lines:
            file.add(line)
        file.finish()
    finally:
        file.abandon()
