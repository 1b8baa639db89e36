"""Output of results: terminal, JSON object, HTML page."""

import argparse
import json
import sys
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from measure import number_format
from report.pages.panels import Page, print_page
from tracefile.commandline.printing import print_json
from tracefile.storage.output import PAGE, Name, check_output, replace_output


def add_page_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write one self-contained HTML page")


def add_verbose_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print all tables, gates and notes (default: one screen)"
    )


def page_path(flags: argparse.Namespace, inputs: Iterable[Name]) -> Path | None:
    """Return ``--html``. Raises InputError if not writable, or an input."""
    check_output(flags.html, PAGE, inputs)
    path: Path | None = flags.html
    return path


def put_page(page: Page, result: object, *, as_json: bool, html: Path | None, verbose: bool = True) -> None:
    """Print a result as page, or as JSON with the page on stderr; write ``html`` if given."""
    if html is not None:
        write_page(html, page)
    if as_json:
        print_json(result)
    print_page(page, beside_json=as_json, verbose=verbose)


def write_page(path: Path, page: Page) -> None:
    """Write a page as HTML and report it on stderr; bytes of a file name that are no text become "?".

    Raises InputError naming ``--html`` if it cannot be written.
    """
    replace_output(path, render_page(page).encode(errors="replace"), PAGE)
    print(f"page: {path}", file=sys.stderr)


def render_page(page: Page) -> str:
    """Return self-contained HTML that opens offline."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # noqa: PLC0415 - flags need no jinja2
    from markupsafe import Markup  # noqa: PLC0415

    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["sentence"] = number_format.sentence
    return environment.get_template("page.html.jinja").render(
        page=page,
        figures_json=Markup(script_json(page.figures)),
        plotly=Markup(_asset("plotly-basic.min.js")),
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
    )


def _asset(name: str) -> str:
    return (files("report.pages") / name).read_text(encoding="utf-8")


def script_json(value: object) -> str:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(letter, escape)
    return text
