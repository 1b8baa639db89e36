"""Terminal-safe output: control characters and bidirectional marks are printed as visible escapes."""

import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from tracefile.records.encoding import encode_document

_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
_MARKS = r"\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
_UNSAFE = re.compile(rf"[{_CONTROLS}{_MARKS}\ud800-\udfff]")


def print_json(value: object) -> None:
    """Print a value as one indented JSON object."""
    print(encode_document(value).decode(), end="")


def print_result(result: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print lines; with ``as_json``: the result as one JSON object on stdout, and the lines on stderr."""
    if as_json:
        print_json(result)
    for line in lines:
        print(printable(line), file=sys.stderr if as_json else sys.stdout)


def printable(text: str) -> str:
    """Replace control characters by JSON escapes (ESC: ``\\u001b``); tabs and line ends are not replaced."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class PrintableStream:
    """Text stream that writes printable text only."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the underlying stream, for terminal escape sequences around text that is already printable."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


@contextlib.contextmanager
def printing_safely() -> Iterator[None]:
    """Make all output printable, in any encoding of the locale."""
    before = sys.stdout, sys.stderr
    streams = [io.StringIO() if stream is None else stream for stream in before]  # closed, as by >&-
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(raw_stream(stream))) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
