"""``report show``: one trace's metrics; ``compare``: traces side by side, as tables and a page; ``curve``: a cache;
``drift``: rolling fits.
"""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from measure.metrics.flags import add_slo_arguments
from measure.metrics.slos import parse_slos
from report.compare.comparison import CompareConfig, compare
from report.compare.terminal import console_for, print_comparison
from report.drift import add_drift_arguments, show_drift
from report.output import add_picture_arguments, pictures_of
from report.show import add_show_arguments, show
from report.sweep import add_sweep_arguments, show_sweep
from tracefile.commandline.ending import run_command
from tracefile.commandline.parser import Parser
from tracefile.commandline.printing import print_json
from tracefile.records.errors import InputError

_EPILOG: Final = """\
examples:
  report compare captured=a.jsonl.zst replayed=b.jsonl.zst predicted=c.jsonl.zst --html report.html
  report compare captured=a.jsonl again=b.jsonl predicted=c.jsonl --gate 'predicted.turns2+.ttft.p50.error<=10%'

Every metric, key and limit is defined in docs/metrics.md. Exit codes: 0 done, 1 a gate failed or no request is
shared, 2 bad input.
"""


_SHOW_EPILOG: Final = """\
examples:
  report show run.jsonl.zst --gpus 8 --html run.html --files run-files
  report show run.jsonl.zst --slo 'ttft.p99<=500ms' --slo 'session.ttfat.p90<=20s' --slo 'turns2+.ttft.p90<=200ms'

Every metric is defined in docs/metrics.md. Exit codes: 0 done, 1 an SLO is missed, 2 bad input.
"""


_SWEEP_EPILOG: Final = """\
examples:
  report sweep nightly/ --html sweep.html --slo 'ttft.p90<=500ms'
  report sweep A=a-p8.jsonl.zst A=a-p16.jsonl.zst B=b-p8.jsonl.zst B=b-p16.jsonl.zst --gpus 8

A folder holds sweep.jsonl, as loadgen sweep writes it. Labels are compared with the first one. A label WORKLOAD/NAME
is compared within its workload alone. Every number is defined in docs/metrics.md. Exit codes: 0 done, 1 no load of a
label meets the SLOs, 2 bad input.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``report``; 1 if a gate or an SLO failed, or if compared traces share no request: then there is no page."""
    flags = _parser().parse_args(argv)
    if flags.command == "show":
        return show(flags)
    if flags.command == "sweep":
        return show_sweep(flags)
    if flags.command == "curve":
        return _draw_curves(flags)
    if flags.command == "drift":
        return show_drift(flags)
    config = _config(flags)
    pictures = pictures_of(flags, config.traces.values())
    compared = compare(config)
    pairs = compared.result.pairs.values()
    comparable = not pairs or any(pair.joined for pair in pairs)
    if comparable and pictures.wanted:
        # The page's libraries take half a second to import: only who wants a page waits for them.
        from report.pages.page import comparison_figures, render_page  # noqa: PLC0415

        pictures.write(render_page(compared), comparison_figures(compared))
    if flags.json:
        print_json(compared.result)
    print_comparison(compared.result, console_for(json=flags.json))
    kept = all(slo.met for slos in compared.result.slos.values() for slo in slos)
    return 0 if comparable and kept and all(gate.passed for gate in compared.result.gates) else 1


def _draw_curves(flags: argparse.Namespace) -> int:
    from report.pages.curvepage import curve_figures, read_curve_files, render_curves  # noqa: PLC0415 - as below

    pictures = pictures_of(flags, [name.partition("=")[2] or name for name in flags.files] + flags.files)
    if not pictures.wanted:
        raise InputError("report curve: nothing to write; expected --html PAGE, --images DIR or both")
    files = read_curve_files(flags.files)
    pictures.write(render_curves(files), curve_figures(files))
    return 0


def _config(flags: argparse.Namespace) -> CompareConfig:
    if flags.bootstrap < 0:
        raise InputError(f"--bootstrap {flags.bootstrap}: expected 0 or more draws")
    traces = {label: Path(path) for label, path in _assignments(flags.traces, "LABEL=TRACE").items()}
    return CompareConfig(
        traces=traces,
        truths=_assignments(flags.truth, "--truth LABEL=TRUTH_LABEL"),
        repeats=tuple(flags.repeat),
        seed=flags.seed,
        bootstrap=flags.bootstrap,
        gates=tuple(flags.gate),
        slos=parse_slos(flags.slo, flags.slo_file, list(traces)),
    )


def command() -> None:
    run_command("report", main)


def _parser() -> Parser:
    parser = Parser(prog="report", description="Metrics, gates and pictures of traces.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_show_arguments(
        commands.add_parser(
            "show",
            help="print one trace's metrics, health checks and SLOs",
            description="Print the metrics of requests, sessions and the workload of one trace; check its health.",
            epilog=_SHOW_EPILOG,
        )
    )
    add_sweep_arguments(
        commands.add_parser(
            "sweep",
            help="compare loads and labels: throughput, latency, hit rates, Pareto sets",
            description="Compare the runs of a sweep: loads of each label, Pareto sets, the largest load within SLOs.",
            epilog=_SWEEP_EPILOG,
        )
    )
    sub = commands.add_parser(
        "compare",
        help="compare captured, replayed and predicted traces",
        description="Compare traces that hold the same requests: cached tokens first, then TTFT survival per cohort.",
        epilog=_EPILOG,
    )
    _add_compare_arguments(sub)
    curve = commands.add_parser(
        "curve",
        help="draw what sim curve, sim misses and sim reuse found",
        description="Draw what sim curve, sim misses and sim reuse print with --json, as one page.",
    )
    add_drift_arguments(
        commands.add_parser(
            "drift",
            help="draw what sim fit --window found: each parameter by time, and changes",
            description="Draw the pace, prediction error and parameters of rolling fits by time, and say what changed.",
        )
    )
    curve.add_argument("files", nargs="+", metavar="[LABEL=]FILE", help="JSON of sim curve, sim misses or sim reuse")
    add_picture_arguments(curve)
    return parser


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", metavar="LABEL=TRACE", help="the first is the truth of the others")
    parser.add_argument(
        "--truth",
        action="append",
        default=[],
        metavar="LABEL=TRUTH_LABEL",
        help="judge LABEL by another label than the first; by itself: by none (repeatable)",
    )
    parser.add_argument(
        "--repeat",
        action="append",
        default=[],
        metavar="LABEL",
        help="the same load measured again: errors are against the mean (repeatable; default: again)",
    )
    add_picture_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default 0)")
    parser.add_argument("--bootstrap", type=int, default=500, metavar="N", help="draws for intervals (default 500)")
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="EXPRESSION",
        help="exit 1 unless it holds: [LABEL.][COHORT.]metric.pNN<=LIMIT (repeatable)",
    )
    add_slo_arguments(parser, "[LABEL.]")


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


if __name__ == "__main__":
    command()
