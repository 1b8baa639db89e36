"""A trace file that grows: lines in, compressed as its suffix says, and never a torn one in its middle.

What the disk does not take (it is full, it is gone) stays in memory, in order, and is tried again: a file whose disk
was full for a while goes on where it stopped. Not for several threads.
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
"""End of the name of a file that another process cut or wrote."""


class TraceFile:
    """An open file at the end of which lines are added."""

    def __init__(
        self, path: str, fd: int, compressor: Compressor | None, size: int, new: Replacement | None = None
    ) -> None:
        """``new``: the file, where it gets the name ``path`` once it is whole."""
        self.path = path
        self.failing = False
        """The disk refused the last bytes."""
        self.size = size
        """Bytes written, and those that are to be."""
        self._fd = fd
        self._written = size
        self._compressor = compressor
        self._pending = bytearray()
        self._new = new

    def take(self, lines: bytes) -> None:
        """Take whole lines; once many are waiting they are written. Never raises: see ``failing``."""
        self._add(lines if self._compressor is None else self._compressor.compress(lines))
        if len(self._pending) >= DRAIN_BYTES and not self.failing:
            self._write_pending()

    def sync(self) -> None:
        """Bring everything taken to the file; raises InputError if the disk does not take it."""
        if self._compressor is not None:
            self._add(self._compressor.sync())
        self.drain()

    def drain(self) -> None:
        """Write what is ready to be; raises InputError, and keeps the rest, if the disk does not take it."""
        if error := self._write_pending():
            raise InputError(
                f"{self.path}: cannot write ({error.strerror or error}); expected room for the trace"
            ) from error

    def finish(self) -> None:
        """Write everything and the compressed stream's end; after an error, ``drain`` goes on with it."""
        if self._compressor is not None:
            compressor, self._compressor = self._compressor, None
            self._add(compressor.finish())
        self.drain()
        if self._new is not None:
            self._take_name(self._new)

    def make_durable(self) -> None:
        """Wait until the disk has what the file has; raises InputError."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}; expected a working disk") from error

    def is_in_place(self) -> bool:
        """Return False if another process deleted, moved, cut or wrote the file; True where that cannot be told."""
        try:
            ours = os.fstat(self._fd)
            if not stat.S_ISREG(ours.st_mode):
                return True
            return ours.st_size == self._written and os.path.samestat(ours, os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def set_aside(self) -> None:
        """Close the file; if it is still under its name, it is ``….lost`` from now on."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                os.rename(self.path, f"{self.path}{LOST_SUFFIX}")
        self.abandon()

    def abandon(self) -> None:
        """Close the file; what was not written is lost, and all of it where it was to replace another when whole."""
        os.close(self._fd)
        if self._new is not None:
            self._new.abandon()

    def _take_name(self, new: Replacement) -> None:
        self.make_durable()
        try:
            new.take_name()
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}; expected a writable folder") from error
        self._new = None

    def _add(self, data: bytes) -> None:
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
    """Open an empty file, device or pipe; raises InputError. ``name``: its suffix selects the compression."""
    where = os.fspath(path)
    # Appending: a file cut by others gets no hole.
    fd = _claimed(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND, overwrite=overwrite)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.ftruncate(fd, 0)
    return TraceFile(where, fd, compressor_for(name or where), 0)


def new_whole_file(path: str | os.PathLike[str], *, overwrite: bool = False, mode: int = 0o666) -> TraceFile:
    """Open a file that gets its name once it is finished; until then the old one stays. Raises InputError."""
    where, new = os.fspath(path), begin_replacement(path, overwrite=overwrite, mode=mode)
    return TraceFile(where, os.open(new.aside, os.O_CLOEXEC | os.O_WRONLY), compressor_for(where), 0, new)


def begin_replacement(path: str | os.PathLike[str], *, overwrite: bool, mode: int = 0o666) -> Replacement:
    """Begin a whole file; raises InputError where it may not replace the old one, or cannot be written.

    ``mode``: permissions of a file that is new, less the umask.
    """
    where, target = os.fspath(path), Path(os.path.realpath(path))
    if target.exists():
        os.close(_claimed(where, os.O_WRONLY, overwrite=overwrite))
    try:
        return Replacement(target, mode)
    except OSError as error:
        raise _unwritable(where, error) from error


def append_to(path: str | os.PathLike[str]) -> TraceFile:
    """A whole file to go on with, compressed as it is; raises InputError if it cannot be had."""
    where = os.fspath(path)
    fd = _claimed(where, os.O_RDWR | os.O_APPEND, overwrite=True)
    head = os.pread(fd, MAGIC_BYTES, 0)
    compressor = new_compressor(compression_of(head)) if head else compressor_for(where)
    return TraceFile(where, fd, compressor, os.fstat(fd).st_size)


def _claimed(where: str, flags: int, *, overwrite: bool) -> int:
    """Open a file as its one writer; raises InputError for content that is not to be overwritten."""
    try:
        fd = os.open(where, os.O_CLOEXEC | flags, 0o666)
    except OSError as error:
        raise _unwritable(where, error) from error
    try:
        size = os.fstat(fd).st_size if stat.S_ISREG(os.fstat(fd).st_mode) else 0
        if size and not overwrite:
            raise InputError(f"{where}: already has {size} bytes; expected a new file, or --overwrite")
        claim(fd, where)
    except InputError:
        os.close(fd)
        raise
    return fd


def claim(fd: int, where: str) -> None:
    """Be the file's one writer until ``fd`` is closed, however that comes; raises InputError if another is."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{where}: another process is writing it; expected a trace that nobody writes") from None
    except OSError:
        return  # a file system without locks


def _unwritable(where: str, error: OSError) -> InputError:
    if isinstance(error, IsADirectoryError):
        return InputError(f"{where}: is a directory; expected a file to write")
    return InputError(f"{where}: cannot write ({error.strerror or error}); expected a writable folder")
