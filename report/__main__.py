"""``report compare``: traces side by side, as tables, as JSON and as one page; ``report curve``: a cache's numbers."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import msgspec
from rich.console import Console

from report.compare.comparison import CompareConfig, Compared, compare
from report.compare.terminal import print_comparison
from tracefile.commandline.ending import run_command
from tracefile.commandline.parser import Parser
from tracefile.records.errors import InputError

STDOUT: Final = "-"
_LABELLED: Final = re.compile(r"[^=/]+=.+")
_EPILOG: Final = """\
examples:
  report compare captured=a.jsonl.zst replayed=b.jsonl.zst predicted=c.jsonl.zst -o report.html
  report compare captured=a.jsonl again=b.jsonl predicted=c.jsonl --gate 'predicted.turns2+.ttft.p50.error<=10%'

Every metric, key and limit is defined in docs/metrics.md. Exit codes: 0 done, 1 a gate failed, 2 bad input.
"""


@dataclass(frozen=True, slots=True)
class CommandConfig:
    """One comparison and where it goes."""

    compare: CompareConfig
    page: Path | None
    json: Path | Literal["-"] | None


def main(argv: Sequence[str]) -> int:
    """Run ``report``; 1 if a gate failed."""
    if argv[:1] == ["curve"]:
        return _draw_curves(_parser().parse_args(argv))
    config = parse_command(argv)
    compared = compare(config.compare)
    if config.page is not None:
        # The page's libraries take half a second to import: only who wants a page waits for them.
        from report.pages.page import render_page  # noqa: PLC0415

        _write(config.page, render_page(compared), "-o")
    _write_json(compared, config.json)
    print_comparison(compared.result, Console(stderr=config.json == STDOUT, highlight=False))
    if config.page is not None:
        print(f"page: {config.page}", file=sys.stderr)
    return 0 if all(gate.passed for gate in compared.result.gates) else 1


def parse_command(argv: Sequence[str]) -> CommandConfig:
    """Flags to config; InputError for what argparse cannot know."""
    flags = _parser().parse_args(_free_json_flag(argv))
    if flags.bootstrap < 0:
        raise InputError(f"--bootstrap {flags.bootstrap}: expected 0 or more draws")
    return CommandConfig(
        compare=CompareConfig(
            traces={label: Path(path) for label, path in _assignments(flags.traces, "LABEL=TRACE").items()},
            truths=_assignments(flags.truth, "--truth LABEL=TRUTH_LABEL"),
            yardstick=flags.aa,
            seed=flags.seed,
            bootstrap=flags.bootstrap,
            gates=tuple(flags.gate),
        ),
        page=flags.output,
        json=flags.json if flags.json in (None, STDOUT) else Path(flags.json),
    )


def command() -> None:
    """The ``report`` command."""
    run_command("report", main)


def _draw_curves(flags: argparse.Namespace) -> int:
    from report.pages.curvefiles import read_curve_files  # noqa: PLC0415
    from report.pages.curvepage import render_curves  # noqa: PLC0415 - as above

    _write(flags.output, render_curves(read_curve_files(flags.files)), "-o")
    print(f"page: {flags.output}", file=sys.stderr)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="report", description="Metrics, gates and pictures of traces.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub = commands.add_parser(
        "compare",
        help="compare captured, replayed and predicted traces",
        description="Compare traces that hold the same requests: cached tokens first, then TTFT survival per cohort.",
        epilog=_EPILOG,
    )
    sub.add_argument("traces", nargs="+", metavar="LABEL=TRACE", help="the first is the truth of the others")
    sub.add_argument(
        "--truth",
        action="append",
        default=[],
        metavar="LABEL=TRUTH_LABEL",
        help="judge LABEL by another label than the first; by itself: by none (repeatable)",
    )
    sub.add_argument("--aa", metavar="LABEL", help="the same load measured again: the yardstick (default: again)")
    sub.add_argument("-o", "--output", type=Path, metavar="PAGE", help="write one self-contained HTML page")
    sub.add_argument(
        "--json", nargs="?", const=STDOUT, metavar="FILE", help="write the result as JSON; without FILE to stdout"
    )
    sub.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default 0)")
    sub.add_argument("--bootstrap", type=int, default=500, metavar="N", help="draws for intervals (default 500)")
    sub.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="EXPRESSION",
        help="exit 1 unless LABEL.COHORT.METRIC.KEY<=NUMBER holds (repeatable)",
    )
    curve = commands.add_parser(
        "curve",
        help="draw what sim curve, sim misses and sim reuse found",
        description="Draw what sim curve, sim misses and sim reuse print with --json, as one page.",
    )
    curve.add_argument("files", nargs="+", metavar="[LABEL=]FILE", help="JSON of sim curve, sim misses or sim reuse")
    curve.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PAGE", help="write one self-contained HTML page"
    )
    return parser


def _free_json_flag(argv: Sequence[str]) -> list[str]:
    """``--json captured=a.jsonl`` means JSON to stdout and a trace, not a file of that name."""
    freed = list(argv)
    for at, (flag, value) in enumerate(pairwise(argv)):
        if flag == "--json" and _LABELLED.fullmatch(value):
            freed[at] = f"--json={STDOUT}"
    return freed


def _assignments(texts: Sequence[str], expected: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        label, equals, value = text.partition("=")
        if not (label.strip() and equals and value):
            raise InputError(f"{text}: expected {expected}")
        if not label.isprintable() or len(label) > 40:
            raise InputError(f"{label[:40]!r}: not a label; expected at most 40 printable characters")
        if label in found:
            raise InputError(f"{text}: label {label!r} is given twice; expected different labels")
        found[label] = value
    return found


def _write_json(compared: Compared, to: Path | Literal["-"] | None) -> None:
    if to is None:
        return
    text = msgspec.json.format(msgspec.json.encode(compared.result), indent=2).decode() + "\n"
    if isinstance(to, Path):
        _write(to, text, "--json")
    else:
        sys.stdout.write(text)


def _write(path: Path, text: str, flag: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written: {error.strerror}; expected a writable path") from error


if __name__ == "__main__":
    command()
