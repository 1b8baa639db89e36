"""``report show``: every metric of one trace, its health checks, and SLOs on it."""

import argparse
import sys
from pathlib import Path

from measure.metrics.flags import add_gpus_argument, add_slo_arguments, checked_gpus
from measure.metrics.slos import parse_slos
from measure.metrics.tables import headline, metric_lines
from measure.metrics.trace import measure_trace
from report.output import print_json
from tracefile.commandline.printing import printable


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace of any format that tracefile reads")
    add_gpus_argument(parser)
    add_slo_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")


def show(flags: argparse.Namespace) -> int:
    """Print the metrics of a trace; 1 if it misses an SLO."""
    slos = parse_slos(flags.slo, flags.slo_file)
    metrics = measure_trace(flags.trace, gpus=checked_gpus(flags.gpus), slos=slos)
    if flags.json:
        print_json(metrics)
    for line in (f"{flags.trace.name}: {headline(metrics)}", *metric_lines(metrics)):
        print(printable(line), file=sys.stderr if flags.json else sys.stdout)
    return 0 if all(slo.met for slo in metrics.slos) else 1
