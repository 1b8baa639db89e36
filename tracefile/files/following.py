"""A trace read while another process writes it: the records so far, then those that come, from segment to segment."""

import contextlib
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tracefile.importers.recognition import recognise
from tracefile.records.decoding import KvtapeDecoder, decode_meta, is_header, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.storage.lines import LineReader
from tracefile.storage.segments import open_lines, segment_number, trace_files

FIRST_FILES = 2
"""Segments read at first: the one being written and the one before it."""


class FollowedTrace:
    """A trace of JSON lines, in one file or in segments, that grows. Raises InputError if it is not there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.meta: Meta | None = None
        """The latest header. None: no line has been written yet."""
        self.unreadable = 0
        """Lines that are no records."""
        self._decoder: KvtapeDecoder | None = None
        self._lines = self._open(trace_files(path)[-FIRST_FILES:][0])

    def new_records(self) -> Iterator[Record]:
        """Yield the records written since the last call."""
        while True:
            # Looked for before the rest is read: a file is whole once there is a next one.
            following = self._following()
            yield from self._so_far()
            if following is None:
                return
            self._lines.close()
            self._lines = self._open(following)

    def close(self) -> None:
        self._lines.close()

    def _open(self, file: str) -> LineReader:
        self._number = segment_number(Path(file))
        return open_lines(file, growing=True)

    def _following(self) -> str | None:
        with contextlib.suppress(InputError):
            return next((file for file in trace_files(self.path) if segment_number(Path(file)) > self._number), None)
        return None  # all were taken away: the open one is read on

    def _so_far(self) -> Iterator[Record]:
        for line in self._lines:
            if not line:
                return
            where = f"{self._lines.path}:{self._lines.number}"
            if self._decoder is None:
                self._begin(line, where)
            elif is_header(line):
                self.meta = decode_meta(parse_object(line, where)["meta"], where)
            else:
                try:
                    yield self._decoder.decode(line, where)
                except InputError:
                    self.unreadable += 1

    def _begin(self, line: bytes, where: str) -> None:
        name, decoder, _ = recognise(line, where)
        if not isinstance(decoder, KvtapeDecoder):
            raise InputError(f"{where}: a trace of format {name}; expected one that kvtape writes, to follow it")
        self._decoder, self.meta = decoder, decoder.meta


def wait_for_more(seconds: float) -> bool:
    """Sleep; return False, at once, if standard input is a pipe and its writer has closed it: our parent has left."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            readable, _, _ = select.select([sys.stdin], [], [], seconds)
            return not readable or bool(os.read(sys.stdin.fileno(), 1 << 16))
    time.sleep(seconds)
    return True
