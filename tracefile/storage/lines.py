"""A trace file's lines, numbered, whatever its compression and however its writer ended."""

import fcntl
import os
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Self

from tracefile.records.errors import InputError
from tracefile.storage.compression import CorruptStreamError, TornStreamError, inflated_pieces
from tracefile.storage.remote import open_file

MAX_LINE_BYTES = 1 << 26
"""Of one line, inflated: the hashes of fifty million tokens in blocks of 16."""
MAX_BLANK_BYTES = 1 << 24
"""Of reads that hold blank lines alone: a few kilobytes of gzip hold gigabytes of them."""


class LineReader:
    """Streams the non-blank lines of a plain, gzip or zstd file, without their line ends.

    ``number`` is the line last given (from 1). ``complete`` is false if it had no line end: then it may be torn.
    ``torn``, known once the lines are used up, says how a compressed stream was cut short.
    ``expected``: kind of file, for the error of one that does not open.
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
        """Lines of the latest read that were not given yet."""
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

    def take_block(self) -> list[bytes]:
        """Take the lines that are left of a read at once, blank ones too; the caller counts them in ``number``.

        Empty at the end of the file. A last line without its end comes alone.
        """
        return list(self._block) or next(self._blocks, [])

    def close(self) -> None:
        self._lines.close()
        self._blocks.close()
        self._file.close()

    def is_being_written(self) -> bool:
        """Return whether a writer on this machine has the file, as ``appending.claim`` does."""
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
            first, *rest = chunk.split(b"\n")
            pending.append(first)
            waiting += len(first)
            if waiting > MAX_LINE_BYTES:
                raise InputError(
                    f"{self.path}:{self.number + 1}: a line beyond {MAX_LINE_BYTES >> 20} MiB; expected a trace"
                )
            if not rest:
                continue
            yield [b"".join(pending), *rest[:-1]]
            pending, waiting = [rest[-1]], len(rest[-1])
        if last := b"".join(pending):
            self.complete = False
            yield [last]

    def _chunks(self) -> Iterator[bytes]:
        try:
            yield from (chunk for chunk, _ in inflated_pieces(self._file) if chunk)
        except TornStreamError as torn:
            self.torn = str(torn)
        except CorruptStreamError as corrupt:
            raise InputError(f"{self.path}:{self.number + 1}: {corrupt}; expected a whole trace file") from None
        except OSError as error:
            raise InputError(f"{self.path}:{self.number + 1}: {error.strerror or error}") from error
