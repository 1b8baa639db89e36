"""Output of results: one JSON object on stdout, or an HTML page in a file."""

import sys
from pathlib import Path

import msgspec

from tracefile.records.errors import InputError


def print_json(result: msgspec.Struct | dict[str, msgspec.Struct]) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")


def write_page(path: Path, html: str) -> None:
    """Write an HTML page and say so on stderr. Raises InputError naming ``--html`` if it cannot be written."""
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: {error.strerror}; expected a writable path") from error
    print(f"page: {path}", file=sys.stderr)
