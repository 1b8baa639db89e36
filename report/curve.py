"""``report curve``: the results of sim curve, sim misses and sim reuse as one page."""

import argparse

from report.output import add_page_argument, page_path, write_page
from tracefile.records.errors import InputError

EPILOG = "examples:\n  report curve curve.json misses.json --html cache.html\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="[LABEL=]FILE", help="JSON of sim curve, sim misses or sim reuse")
    add_page_argument(parser)


def run(flags: argparse.Namespace) -> int:
    """Draw the files."""
    from report.pages.curvepage import read_curve_files, render_curves  # noqa: PLC0415 - as below

    html = page_path(flags, [name.partition("=")[2] or name for name in flags.files] + flags.files)
    if html is None:
        raise InputError("report curve: nothing to write; expected --html PAGE")
    write_page(html, render_curves(read_curve_files(flags.files)))
    return 0
