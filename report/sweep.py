"""``report sweep``: the points of a sweep side by side, as tables and a page."""

import argparse
from typing import TYPE_CHECKING, Final

from measure.metrics.flags import add_gpus_argument, add_slo_arguments, checked_bootstrap, checked_gpus
from report.output import add_page_argument, page_path, write_page
from tracefile.commandline.parser import seed
from tracefile.commandline.printing import print_result
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    from measure.metrics import slos
    from report.sweeps import inputs, measuring, page, terminal
    from report.sweeps.results import Sweep
else:  # numpy, and a page's libraries, which the flags need not
    slos = LateModule("measure.metrics.slos")
    inputs, measuring, page, terminal = late_modules("report.sweeps", "inputs measuring page terminal")

EPILOG: Final = """\
A folder holds sweep.jsonl, as loadgen sweep writes it. Labels are compared with the first one. A label WORKLOAD/NAME
is compared within its workload alone. Every number is defined in docs/metrics.md. Exit codes: 0 done, 1 no load of a
label meets the SLOs, 2 bad input.

examples:
  report sweep nightly/ --html sweep.html --slo 'ttft.p90<=500ms'
  report sweep A=a-p8.jsonl.zst A=a-p16.jsonl.zst B=b-p8.jsonl.zst B=b-p16.jsonl.zst --gpus 8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="DIR|LABEL=TRACE",
        help="folder of a sweep; or a trace, several of a label are its line",
    )
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    add_gpus_argument(parser)
    add_slo_arguments(parser, "[LABEL.]")
    parser.add_argument("--mixed", action="store_true", help="compare runs of other models, engines or workloads too")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the bootstrap")
    parser.add_argument("--bootstrap", type=int, default=200, help="draws for intervals")


def run(flags: argparse.Namespace) -> int:
    """Print a sweep; 1 if no load of a label meets the SLOs."""
    checked_bootstrap(flags.bootstrap)
    left_out: list[str] = []
    planned = inputs.plan_runs(flags.runs, left_out)
    html = page_path(flags, [run.path for run in planned if run.path.exists()])
    goals = slos.parse_slos(flags.slo, flags.slo_file, list(dict.fromkeys(run.label for run in planned)))
    question = measuring.Question(goals, checked_gpus(flags.gpus), flags.mixed, flags.bootstrap, flags.seed)
    sweep = measuring.measure_sweep(planned, left_out, question)
    if html is not None:
        write_page(html, page.render_sweep(sweep, page.draw_sweep(sweep)))
    print_result(sweep, terminal.sweep_lines(sweep), as_json=flags.json)
    return 0 if _slos_are_met(sweep) else 1


def _slos_are_met(sweep: "Sweep") -> bool:
    lines = [line for found in sweep.workloads for line in found.lines]
    return all(any(point.meets for point in line.points) for line in lines)
