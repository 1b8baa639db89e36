"""Numbered lines of a trace file, of any compression, truncated or not."""

import fcntl
import os
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Self

from tracefile.records.errors import InputError
from tracefile.storage.compression import CorruptStreamError, TornStreamError, inflated_pieces
from tracefile.storage.remote import open_file

MAX_LINE_BYTES = 1 << 26
"""Maximum line size, decompressed: the block hashes of fifty million tokens in blocks of 16."""
MAX_BLANK_BYTES = 1 << 24
"""Maximum blank bytes: a few kilobytes of gzip can hold gigabytes of blank lines."""


class LineReader:
    """Iterator over the non-blank lines of a plain, gzip or zstd file, without line ends.

    ``number``: latest line, from 1. ``complete``: false if the latest line has no line end, so it may be torn.
    ``torn``: after the last line, how a compressed stream was truncated. ``expected``: kind of file, for the error.
    """

    def __init__(self, path: str | os.PathLike[str], *, expected: str = "a trace file") -> None:
        self.path = os.fspath(path)
        self.number = 0
        self.complete = True
        self.torn: str | None = None
        try:
            self._file = open_file(self.path)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}; expected {expected}") from error
        self._blocks = self._read_blocks()
        self._block: Iterator[bytes] = iter(())
        """Remaining lines of the latest read."""
        self._lines = self._read_lines()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        return self._lines

    def __next__(self) -> bytes:
        return next(self._lines)

    def next_block(self) -> list[bytes]:
        """Return the remaining lines of a read, blank lines too; the caller adds them to ``number``.

        Empty at the end of the file. A last line without line end is returned alone.
        """
        return list(self._block) or next(self._blocks, [])

    def close(self) -> None:
        self._lines.close()
        self._blocks.close()
        self._file.close()

    def is_being_written(self) -> bool:
        """Return whether a writer on this machine has locked the file (``appending.lock_writer``)."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # a file system without locks
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def _read_lines(self) -> Generator[bytes, None, None]:
        for block in self._blocks:
            self._block = iter(block)
            for line in self._block:
                self.number += 1
                if line and not line.isspace():
                    yield line

    def _read_blocks(self) -> Generator[list[bytes], None, None]:
        pending: list[bytes] = []
        waiting = blank = 0
        for chunk in self._chunks():
            blank += len(chunk) if chunk.isspace() else 0
            if blank > MAX_BLANK_BYTES:
                raise InputError(f"{self.path}: more than {MAX_BLANK_BYTES >> 20} MiB of blank lines; expected a trace")
            first, *following = chunk.split(b"\n")
            pending.append(first)
            waiting += len(first)
            if waiting > MAX_LINE_BYTES:
                raise InputError(
                    f"{self.path}:{self.number + 1}: a line of more than {MAX_LINE_BYTES >> 20} MiB; expected a trace"
                )
            if not following:
                continue
            yield [b"".join(pending), *following[:-1]]
            pending, waiting = [following[-1]], len(following[-1])
        if last := b"".join(pending):
            self.complete = False
            yield [last]

    def _chunks(self) -> Iterator[bytes]:
        try:
            yield from (chunk for chunk, _ in inflated_pieces(self._file) if chunk)
        except TornStreamError as torn:
            self.torn = str(torn)
        except CorruptStreamError as corrupt:
            raise InputError(f"{self.path}:{self.number + 1}: {corrupt}; expected an undamaged trace file") from None
        except OSError as error:
            raise InputError(f"{self.path}:{self.number + 1}: {error.strerror or error}") from error
