"""``report``: latency, throughput and cache metrics, gates and figures of traces."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

from collections.abc import Sequence

from tracefile.commandline.exit_codes import run_command
from tracefile.commandline.subcommands import Subcommand, run_subcommand

COMMANDS = {
    "show": Subcommand("report.showflags", "print the metrics of a trace, or the points of a sweep side by side"),
    "compare": Subcommand(
        "report.compareflags", "compare traces of the same requests: cached tokens first, then TTFT survival per cohort"
    ),
}


def main(argv: Sequence[str]) -> int:
    return run_subcommand("report", "Metrics, gates and pictures of traces.", COMMANDS, argv)


def command() -> None:
    run_command("report", main)


if __name__ == "__main__":
    command()
