"""Text of traces made safe for a terminal: control characters and marks that reorder text become visible escapes."""

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
    """Print lines; with ``as_json`` the result as one JSON object on stdout, and the lines on stderr."""
    if as_json:
        print_json(result)
    for line in lines:
        print(printable(line), file=sys.stderr if as_json else sys.stdout)


def printable(text: str) -> str:
    """Return the text with ``\\u001b`` for ESC and the like, which JSON reads as before; tabs and line ends stay."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PrintableStream:
    """A text stream that writes printable text only."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream itself, for those who write a terminal's own sequences around text that they made printable."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


@contextlib.contextmanager
def printing_safely() -> Iterator[None]:
    """Let everything printed be printable, in whatever encoding the locale has."""
    before = sys.stdout, sys.stderr
    given = [io.StringIO() if stream is None else stream for stream in before]  # closed, as by >&-
    for stream in given:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(raw_stream(stream))) for stream in given)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
