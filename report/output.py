"""Output of results: an HTML page in a file."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from tracefile.storage.output import PAGE, Name, check_output, replace_output


def add_page_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write one self-contained HTML page")


def page_path(flags: argparse.Namespace, inputs: Iterable[Name]) -> Path | None:
    """Return ``--html``. Raises InputError if it cannot be written or is one of ``inputs``."""
    check_output(flags.html, PAGE, inputs)
    path: Path | None = flags.html
    return path


def write_page(path: Path, html: str) -> None:
    """Write an HTML page and say so on stderr; bytes of a file name that are no text become "?".

    Raises InputError naming ``--html`` if it cannot be written.
    """
    replace_output(path, html.encode(errors="replace"), PAGE)
    print(f"page: {path}", file=sys.stderr)
