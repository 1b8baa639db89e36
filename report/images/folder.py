"""A folder of images: each figure of a page as ``NAME.svg`` and ``NAME.png``."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tracefile.records.errors import InputError
from tracefile.records.extras import lacking
from tracefile.storage.output import PNG, SVG, replace_output

LIBRARY: Final = "matplotlib"
KINDS: Final = {"svg": SVG, "png": PNG}


def can_draw() -> bool:
    """Return whether the library that draws is installed."""
    return importlib.util.find_spec(LIBRARY) is not None


def check_images(folder: Path) -> None:
    """Raise InputError unless images can be drawn into ``folder``."""
    where = f"--images {folder}"
    if not can_draw():
        raise InputError(f"{where}: {lacking(LIBRARY)}")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{where}: is a file; expected a folder")
    if not folder.resolve().parent.is_dir():
        raise InputError(f"{where}: its folder is not there; expected one to write in")


def write_images(folder: Path, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw every figure and say where; a file there is replaced if it is an image of the same kind."""
    from report.images.drawing import draw_images  # noqa: PLC0415 - optional, and half a second to import

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"--images {folder}: {error.strerror}; expected a writable folder") from error
    for name, figure in figures.items():
        for suffix, content in draw_images(figure).items():
            replace_output(folder / f"{name.strip('-')}.{suffix}", content, KINDS[suffix], "--images")
    count = f"{len(figures)} figure{'' if len(figures) == 1 else 's'}"
    print(f"images: {folder}: {count} as SVG and PNG", file=sys.stderr)
