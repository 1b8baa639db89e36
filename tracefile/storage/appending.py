"""Append-only trace file, compressed by its suffix, without torn lines in its middle.

Bytes that the disk refuses (full, gone) stay in memory, in order, and are written later: after a full disk, the file
continues without a gap. Not thread-safe.
"""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from tracefile.records.errors import InputError
from tracefile.storage.compression import MAGIC_BYTES, Compressor, compression_of, compressor_for, new_compressor
from tracefile.storage.durable import Replacement

DRAIN_BYTES = 1 << 18

LOST_SUFFIX = ".lost"
"""Suffix of a file that another process truncated or wrote to."""


class TraceFile:
    """An open file to which lines are appended."""

    def __init__(
        self, path: str, fd: int, compressor: Compressor | None, size: int, new: Replacement | None = None
    ) -> None:
        """``new``: temporary file that is renamed to ``path`` when it is complete."""
        self.path = path
        self.failing = False
        """The disk refused the last bytes."""
        self.size = size
        """Bytes written and buffered."""
        self._fd = fd
        self._written = size
        self._compressor = compressor
        self._pending = bytearray()
        self._new = new

    def add(self, lines: bytes) -> None:
        """Add complete lines; written once ``DRAIN_BYTES`` are buffered. Never raises: see ``failing``."""
        self._buffer(lines if self._compressor is None else self._compressor.compress(lines))
        if len(self._pending) >= DRAIN_BYTES and not self.failing:
            self._write_pending()

    def sync(self) -> None:
        """Write all added lines to the file; raises InputError if the disk refuses them."""
        if self._compressor is not None:
            self._buffer(self._compressor.sync())
        self.drain()

    def drain(self) -> None:
        """Write buffered bytes; raises InputError, and keeps the rest, if the disk refuses them."""
        if error := self._write_pending():
            raise InputError(
                f"{self.path}: cannot write ({error.strerror or error}); expected free disk space"
            ) from error

    def finish(self) -> None:
        """Write all lines and the end of the compressed stream; after an error, ``drain`` continues."""
        if self._compressor is not None:
            compressor, self._compressor = self._compressor, None
            self._buffer(compressor.finish())
        self.drain()
        if self._new is not None:
            self._commit(self._new)

    def make_durable(self) -> None:
        """Sync the file to disk; raises InputError."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}; expected a working disk") from error

    def is_unchanged(self) -> bool:
        """Return False if another process deleted, moved, truncated or wrote the file; True if unknown."""
        try:
            stat_of_fd = os.fstat(self._fd)
            if not stat.S_ISREG(stat_of_fd.st_mode):
                return True
            return stat_of_fd.st_size == self._written and os.path.samestat(stat_of_fd, os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def set_aside(self) -> None:
        """Close the file and, if it still has its name, rename it to ``….lost``."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                os.rename(self.path, f"{self.path}{LOST_SUFFIX}")
        self.abandon()

    def abandon(self) -> None:
        """Close the file without writing buffered bytes; a temporary file is deleted."""
        os.close(self._fd)
        if self._new is not None:
            self._new.abandon()

    def _commit(self, new: Replacement) -> None:
        self.make_durable()
        try:
            new.commit()
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}; expected a writable folder") from error
        self._new = None

    def _buffer(self, data: bytes) -> None:
        self._pending += data
        self.size += len(data)

    def _write_pending(self) -> OSError | None:
        try:
            while self._pending:
                written = os.write(self._fd, self._pending)
                self._written += written
                del self._pending[:written]
        except OSError as error:
            self.failing = True
            return error
        self.failing = False
        return None


def new_trace_file(path: str | os.PathLike[str], *, overwrite: bool = False, name: str | None = None) -> TraceFile:
    """Open an empty file, device or pipe; raises InputError. ``name``: its suffix selects compression."""
    where = os.fspath(path)
    # O_APPEND: a file truncated by another process gets no hole.
    fd = _open_locked(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND, overwrite=overwrite)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.ftruncate(fd, 0)
    return TraceFile(where, fd, compressor_for(name or where), 0)


def new_atomic_file(path: str | os.PathLike[str], *, overwrite: bool = False, mode: int = 0o666) -> TraceFile:
    """Open a temporary file that replaces ``path`` when finished. Raises InputError."""
    where, new = os.fspath(path), begin_replacement(path, overwrite=overwrite, mode=mode)
    return TraceFile(where, os.open(new.aside, os.O_CLOEXEC | os.O_WRONLY), compressor_for(where), 0, new)


def begin_replacement(path: str | os.PathLike[str], *, overwrite: bool, mode: int = 0o666) -> Replacement:
    """Create a temporary file that will replace ``path``; raises InputError if it may not, or cannot be written.

    ``mode``: permissions of a new file, less the umask.
    """
    where, target = os.fspath(path), Path(os.path.realpath(path))
    if target.exists():
        os.close(_open_locked(where, os.O_WRONLY, overwrite=overwrite))
    try:
        return Replacement(target, mode)
    except OSError as error:
        raise _unwritable(where, error) from error


def append_to(path: str | os.PathLike[str]) -> TraceFile:
    """Open a complete file to append to, with its compression; raises InputError."""
    where = os.fspath(path)
    fd = _open_locked(where, os.O_RDWR | os.O_APPEND, overwrite=True)
    head = os.pread(fd, MAGIC_BYTES, 0)
    compressor = new_compressor(compression_of(head)) if head else compressor_for(where)
    return TraceFile(where, fd, compressor, os.fstat(fd).st_size)


def _open_locked(where: str, flags: int, *, overwrite: bool) -> int:
    """Open a file as its only writer; raises InputError for content without ``overwrite``."""
    try:
        fd = os.open(where, os.O_CLOEXEC | flags, 0o666)
    except OSError as error:
        raise _unwritable(where, error) from error
    try:
        size = os.fstat(fd).st_size if stat.S_ISREG(os.fstat(fd).st_mode) else 0
        if size and not overwrite:
            raise InputError(f"{where}: already has {size} bytes; expected a new file, or --overwrite")
        lock_writer(fd, where)
    except InputError:
        os.close(fd)
        raise
    return fd


def lock_writer(fd: int, where: str) -> None:
    """Lock a file for its only writer until ``fd`` is closed; raises InputError if another process has the lock."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{where}: another process is writing to it; expected a trace without a writer") from None
    except OSError:
        return  # a file system without locks


def _unwritable(where: str, error: OSError) -> InputError:
    if isinstance(error, IsADirectoryError):
        return InputError(f"{where}: is a directory; expected a file to write")
    return InputError(f"{where}: cannot write ({error.strerror or error}); expected a writable folder")
