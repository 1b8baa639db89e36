"""Output of results: one JSON object on stdout, or an HTML page in a file."""

import sys
from pathlib import Path

import msgspec

from tracefile.storage.output import PAGE, replace_output


def print_json(result: msgspec.Struct | dict[str, msgspec.Struct]) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")


def write_page(path: Path, html: str) -> None:
    """Write an HTML page and say so on stderr. Raises InputError naming ``--html`` if it cannot be written."""
    replace_output(path, html.encode(), PAGE)
    print(f"page: {path}", file=sys.stderr)
