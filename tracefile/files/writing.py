"""Writing traces: a header, then records as requests finish, so that a killed writer loses at most a second."""

import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from tracefile.records.encoding import encode_meta, encode_record
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.storage.appending import append_to, begin_replacement, new_trace_file, new_whole_file
from tracefile.storage.output import is_replaceable, mode_like, refuse_inputs

FLUSH_INTERVAL_S = 1.0


class TraceWriter:
    """Appends records to a new trace; ``.gz`` and ``.zst`` suffixes compress. Threads may share one.

    The header is on disk when the constructor returns. Records follow within a second, by a thread of its own, and
    at ``flush`` and ``close``. Where the disk takes nothing (full, gone), the writer keeps what it
    had taken and tries again with each record: an error from ``write`` means that this one record was refused, and
    the file never has a torn line in its middle.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: Meta,
        *,
        overwrite: bool = False,
        append: bool = False,
        whole: bool = False,
        mode: int = 0o666,
    ) -> None:
        """``append``: go on with a whole trace (``tracefile.storage.repair`` makes it one) on the same clock.

        ``whole``: write beside, and take the file's name at the end, unless an error ends the ``with`` block.
        ``mode``: permissions of a new whole file.
        """
        self.path = os.fspath(path)
        if self.path.endswith(".parquet"):
            raise InputError(f"{self.path}: lines are written here; expected .jsonl, .jsonl.gz or .jsonl.zst")
        self.count = 0
        self._lock = threading.Lock()
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._meta = meta
        header = encode_meta(meta)
        self._whole = whole
        if append:
            self._file = append_to(path)
        elif whole:
            self._file = new_whole_file(path, overwrite=overwrite, mode=mode)
        else:
            self._file = new_trace_file(path, overwrite=overwrite)
        try:
            self._file.take(header)
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
        if kind is not None and self._whole:
            self._end_flusher()
            self._file.abandon()
        else:
            self.close()

    def write(self, record: Record) -> None:
        """Take one record; raises InputError if it was refused (and only then)."""
        line = encode_record(record)
        with self._lock:
            self._take(line)
            self.count += 1

    def change_meta(self, meta: Meta) -> None:
        """Put a header before the records to come, if it says something new; clock, blocks and hashes stay the same."""
        with self._lock:
            if meta is not self._meta and meta != self._meta:
                self._take(encode_meta(meta))
            self._meta = meta

    def flush(self) -> None:
        """Bring every record taken so far to the file; raises InputError if the disk does not take them."""
        with self._lock:
            self._dirty.clear()
            self._file.sync()

    def close(self) -> None:
        """Flush, end the compressed stream and close the file; closing twice is harmless."""
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

    def _take(self, line: bytes) -> None:
        if self._file.failing:
            self._file.drain()
        self._file.take(line)
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
    """Return the path to write to, of a path or ``-`` for stdout; raises InputError if it is one of the inputs."""
    path = "/dev/stdout" if os.fspath(path) == "-" else path
    refuse_inputs(path, inputs)
    return path


def check_new(
    path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]], overwrite: bool = False
) -> None:
    """Raises InputError, before a long run, where ``new_writer`` would after it."""
    path = _output(path, inputs)
    if is_replaceable(path):
        begin_replacement(path, overwrite=overwrite).abandon()


def new_writer(
    path: str | os.PathLike[str], meta: Meta, *, inputs: Iterable[str | os.PathLike[str]], overwrite: bool = False
) -> TraceWriter:
    """Return a writer of a whole trace; ``-``: to stdout.

    The file gets its name once it is whole. Raises InputError if it is one of the command's ``inputs``.
    """
    path = _output(path, inputs)
    return TraceWriter(path, meta, overwrite=overwrite, whole=is_replaceable(path), mode=mode_like(inputs))


def write_lines(
    path: str | os.PathLike[str],
    lines: Iterable[bytes],
    *,
    inputs: Iterable[str | os.PathLike[str]],
    overwrite: bool = False,
) -> None:
    """Write lines of another format, compressed by suffix, whole or not at all; ``-``: to stdout. Raises InputError."""
    path = _output(path, inputs)
    if is_replaceable(path):
        file = new_whole_file(path, overwrite=overwrite, mode=mode_like(inputs))
    else:
        file = new_trace_file(path, overwrite=overwrite)
    try:
        for line in lines:
            file.take(line)
        file.finish()
    finally:
        file.abandon()
