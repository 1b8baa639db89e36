"""Following a trace that grows."""

import contextlib
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tracefile.files.reading import recognise
from tracefile.records.decoding import KvtapeDecoder, decode_meta, is_header, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.storage.segments import open_lines, segment_number, trace_files


class FollowedTrace:
    """A trace of JSON lines that grows, in one file or in segments; every look reads its last file again."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.meta: Meta | None = None
        """The latest header. None: no line has been written yet."""
        self.unreadable = 0
        """Lines that are no records."""
        self._decoder: KvtapeDecoder | None = None
        self._number = segment_number(Path(trace_files(path)[-2:][0]))
        """Of the file read last: at first the one before the one that is written."""
        self._seen = 0
        """Lines of it that were read."""

    def new_records(self) -> Iterator[Record]:
        """Yield the records written since the last call. Raises InputError if the trace is not there."""
        for file in trace_files(self.path):
            number = segment_number(Path(file))
            if number < self._number:
                continue
            if number > self._number:
                self._number, self._seen = number, 0
            with open_lines(file) as lines:
                for line in lines:
                    if lines.complete and lines.number > self._seen:
                        self._seen = lines.number
                        yield from self._decoded(line, f"{lines.path}:{lines.number}")

    def _decoded(self, line: bytes, where: str) -> Iterator[Record]:
        if self._decoder is None:
            name, decoder = recognise(line, where)
            if not isinstance(decoder, KvtapeDecoder):
                raise InputError(f"{where}: a trace of format {name}; expected one that kvtape writes, to follow it")
            self._decoder, self.meta = decoder, decoder.meta
        elif is_header(line):
            self.meta = decode_meta(parse_object(line, where)["meta"], where)
        else:
            try:
                yield self._decoder.decode(line, where)
            except InputError:
                self.unreadable += 1


def wait_for_more(seconds: float) -> bool:
    """Sleep; return False, at once, if standard input is a pipe and its writer has closed it: our parent has left."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            readable, _, _ = select.select([sys.stdin], [], [], seconds)
            return not readable or bool(os.read(sys.stdin.fileno(), 1 << 16))
    time.sleep(seconds)
    return True
