"""``report drift``: rolling fits of ``sim fit --window`` as one page: each parameter by time, and where it changed."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from measure.fitindex import INDEX, read_windows
from report.output import add_page_argument, page_path, write_page
from tracefile.commandline.printing import print_result
from tracefile.records.errors import InputError
from tracefile.records.latenames import late_modules

if TYPE_CHECKING:
    from report.rolling import drift, page
else:  # numpy, and a page's libraries, which the flags need not
    drift, page = late_modules("report.rolling", "drift page")

EPILOG = "examples:\n  report drift windows --html drift.html\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of sim fit --window")
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")


def run(flags: argparse.Namespace) -> int:
    """Print what changed, write the page."""
    windows = read_windows(flags.folder)
    if not any(window.status == "fitted" for window in windows):
        reason = f" (the first: {windows[0].reason})" if windows else ""
        raise InputError(f"{flags.folder / INDEX}: no window is fitted{reason}; expected one or more")
    html = page_path(flags, [flags.folder / INDEX])
    found = drift.make_page(windows)
    if html is not None:
        write_page(html, page.render_drift(found))
    print_result(found, drift.drift_lines(found), as_json=flags.json)
    return 0
