"""Writing traces: a header, then records as requests finish, so that a killed writer loses at most a second."""

import os
import stat
import threading
from types import TracebackType
from typing import Any, Self

import msgspec

from tracefile.compression import compressor_for
from tracefile.errors import InputError
from tracefile.schema import Meta, Record
from tracefile.unknown import merge_unknown

FLUSH_INTERVAL_S = 1.0
DRAIN_BYTES = 1 << 18

_encoder = msgspec.json.Encoder()


def encode_record(record: Record) -> bytes:
    """The record's line, its line end included; unset fields are left out, NaN and infinities become null.

    Raises InputError if ``extra`` holds a known field's name.
    """
    if record.extra:
        return _encoder.encode(merge_unknown(record)) + b"\n"
    return _encoder.encode(record) + b"\n"


def encode_meta(meta: Meta) -> bytes:
    """The header line, its line end included."""
    return _encoder.encode({"meta": meta_object(meta)}) + b"\n"


def meta_object(meta: Meta) -> dict[str, Any]:
    """The header as JSON; always with its schema, which is how readers tell the format."""
    return {"schema": meta.schema, **merge_unknown(meta)}


class TraceWriter:
    """Appends records to a new trace; ``.gz`` and ``.zst`` suffixes compress. Threads may share one.

    The header is on disk when the constructor returns. Records follow within a second, by a thread of its own, and
    at ``flush`` and ``close``. Where the disk takes nothing (full, gone), the writer keeps what it
    had taken and tries again with each record: an error from ``write`` means that this one record was refused, and
    the file never has a torn line in its middle.
    """

    def __init__(self, path: str | os.PathLike[str], meta: Meta, *, overwrite: bool = False) -> None:
        self.path = os.fspath(path)
        self.count = 0
        """Records taken so far."""
        self._compressor = compressor_for(path)
        self._pending = bytearray()
        self._lock = threading.Lock()
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._failing = False
        header = encode_meta(meta)
        self._fd = _open_new(self.path, overwrite)
        try:
            self._take(header)
            self.flush()
        except BaseException:
            os.close(self._fd)
            raise
        self._flusher = threading.Thread(target=self._flush_each_second, name="trace-flush", daemon=True)
        self._flusher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Take one record; raises InputError if it was refused (and only then)."""
        line = encode_record(record)
        with self._lock:
            if self._failing:
                self._drain()
            self._take(line)
            self.count += 1
            if len(self._pending) >= DRAIN_BYTES:
                self._try_drain()
        if not self._dirty.is_set():
            self._dirty.set()

    def flush(self) -> None:
        """Bring every record taken so far to the file; raises InputError if the disk does not take them."""
        with self._lock:
            self._dirty.clear()
            if self._compressor is not None:
                self._pending += self._compressor.sync()
            self._drain()

    def close(self) -> None:
        """Flush, end the compressed stream and close the file; closing twice is harmless."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._dirty.set()
        self._flusher.join()
        try:
            with self._lock:
                if self._compressor is not None:
                    self._pending += self._compressor.finish()
                self._drain()
        finally:
            os.close(self._fd)

    def _take(self, line: bytes) -> None:
        self._pending += line if self._compressor is None else self._compressor.compress(line)

    def _drain(self) -> None:
        """Write what is pending; what the disk does not take stays, to be tried again in order."""
        try:
            while self._pending:
                del self._pending[: os.write(self._fd, self._pending)]
            self._failing = False
        except OSError as error:
            self._failing = True
            raise InputError(
                f"{self.path}: cannot write ({error.strerror or error}); expected room for the trace"
            ) from error

    def _try_drain(self) -> None:
        try:
            self._drain()
        except InputError:
            # The record is taken; the next write, flush or close reports the disk if it still refuses.
            return

    def _flush_each_second(self) -> None:
        while not self._closing.is_set():
            self._dirty.wait()
            if self._closing.wait(FLUSH_INTERVAL_S):
                return
            try:
                self.flush()
            except InputError:
                self._dirty.set()


def _open_new(path: str, overwrite: bool) -> int:
    """A file descriptor on an empty file (or on a device or pipe); raises InputError if it cannot be had."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InputError(f"{path}: cannot write ({error.strerror or error}); expected a writable folder") from error
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_size:
        if not overwrite:
            os.close(fd)
            raise InputError(
                f"{path}: already has {found.st_size} bytes; expected a new file, or leave to overwrite it"
            )
        os.ftruncate(fd, 0)
    return fd
