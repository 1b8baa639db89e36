"""``report compare``: latency and cached tokens of traces side by side, as tables and a page."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from measure.metrics.flags import checked_bootstrap
from report.output import add_page_argument, page_path, put_page
from tracefile.commandline.parser import Parser, seed
from tracefile.records.errors import InputError

EPILOG: Final = """\
Every metric, key and limit is defined in docs/metrics.md. Exit codes: 0 done, 1 a gate failed or no request is
shared, 2 bad input, 3 no gate failed but one is too uncertain to say.

examples:
  report compare captured=a.jsonl.zst replayed=b.jsonl.zst predicted=c.jsonl.zst --html report.html
  report compare captured=a.jsonl again=b.jsonl predicted=c.jsonl --gate 'predicted.turns2+.ttft.p50.error<=10%'
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="LABEL=TRACE",
        help="the first is the truth of the others; of a prediction, the first measured under its conditions",
    )
    parser.add_argument(
        "--repeat",
        action="append",
        default=[],
        metavar="LABEL",
        help="the same load measured again: errors are against the mean (repeatable; default: again)",
    )
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="EXPRESSION",
        help="exit 1 unless it holds, 3 if too uncertain: [LABEL.][COHORT.]metric.pNN<=LIMIT, as ttft.p90.error<=10%% "
        "(repeatable)",
    )
    parser.add_argument("--bootstrap", type=int, default=500, help="draws for intervals, 0: none")
    parser.add_setting("--seed", type=seed, default=0, help="seed of the bootstrap")


def run(flags: argparse.Namespace) -> int:
    """Compare; 1 if a gate failed, or if the traces share no request: no page then.

    3 if no gate failed and a gate is too uncertain.
    """
    from report.compare import comparison, gates, panels

    checked_bootstrap(flags.bootstrap)
    traces = {label: Path(path) for label, path in _assignments(flags.traces, "LABEL=TRACE").items()}
    config = comparison.CompareConfig(
        traces=traces,
        repeats=tuple(flags.repeat),
        seed=flags.seed,
        bootstrap=flags.bootstrap,
        gates=tuple(flags.gate),
    )
    html = page_path(flags, traces.values())
    compared = comparison.compare(config)
    pairs = compared.result.pairs.values()
    comparable = not pairs or any(pair.joined for pair in pairs)
    put_page(panels.comparison_page(compared), compared.result, as_json=flags.json, html=html if comparable else None)
    return gates.exit_code(compared.result.gates) if comparable else 1


def _assignments(texts: Sequence[str], expected: str) -> dict[str, str]:
    paths: dict[str, str] = {}
    for text in texts:
        label, equals, value = text.partition("=")
        if not (label.strip() and equals and value):
            raise InputError(f"{text}: expected {expected}")
        if not label.isprintable() or len(label) > 40:
            raise InputError(f"{label[:40]!r}: not a label; expected at most 40 printable characters")
        if label in paths:
            raise InputError(f"{text}: label {label!r} is given twice; expected different labels")
        paths[label] = value
    return paths
