"""Output of results: an HTML page in a file, and its figures as images."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report.images.folder import check_images, write_images
from tracefile.storage.output import PAGE, Name, check_output, replace_output


def write_page(path: Path, html: str) -> None:
    """Write an HTML page and say so on stderr; bytes of a file name that are no text become "?".

    Raises InputError naming ``--html`` if it cannot be written.
    """
    replace_output(path, html.encode(errors="replace"), PAGE)
    print(f"page: {path}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Places for a command's page and for its figures; None: not asked for."""

    page: Path | None = None
    images: Path | None = None

    @property
    def wanted(self) -> bool:
        return self.page is not None or self.images is not None

    def write(self, html: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
        """Write a page and its figures where they are wanted. Raises InputError with the flag."""
        if self.page is not None:
            write_page(self.page, html)
        if self.images is not None:
            write_images(self.images, figures)


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write one self-contained HTML page")
    parser.add_argument("--images", type=Path, metavar="DIR", help="write the page's figures there, as SVG and PNG")


def pictures_of(flags: argparse.Namespace, inputs: Iterable[Name]) -> Pictures:
    """Return the places that the flags give. Raises InputError if one cannot be written or is an input."""
    check_output(flags.html, PAGE, inputs)
    if flags.images is not None:
        check_images(flags.images)
    return Pictures(flags.html, flags.images)
