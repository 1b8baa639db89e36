"""``report curve``: the results of sim curve, sim misses and sim reuse as one page."""

import argparse

from report.output import add_picture_arguments, pictures_of
from tracefile.records.errors import InputError

EPILOG = "examples:\n  report curve curve.json misses.json --html cache.html\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="[LABEL=]FILE", help="JSON of sim curve, sim misses or sim reuse")
    add_picture_arguments(parser)


def run(flags: argparse.Namespace) -> int:
    """Draw the files."""
    from report.pages.curvepage import curve_figures, read_curve_files, render_curves  # noqa: PLC0415 - as below

    pictures = pictures_of(flags, [name.partition("=")[2] or name for name in flags.files] + flags.files)
    if not pictures.wanted:
        raise InputError("report curve: nothing to write; expected --html PAGE, --images DIR or both")
    files = read_curve_files(flags.files)
    pictures.write(render_curves(files), curve_figures(files))
    return 0
