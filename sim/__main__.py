"""``sim``: prefix cache hits and latency of a trace, simulated."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

from collections.abc import Sequence

from tracefile.commandline.exit_codes import run_command
from tracefile.commandline.subcommands import Subcommand, run_subcommand

COMMANDS = {
    "pool": Subcommand("sim.cache.poolflags", "prefix hits of a trace in a block pool of one size"),
    "curve": Subcommand("sim.cache.curveflags", "prefix hits of a trace by cache size, and reuse of its blocks"),
    "misses": Subcommand("sim.cache.missesflags", "causes of cache misses at one size, and evictions by group"),
    "audit": Subcommand(
        "sim.fit.auditflags", "compare reported cached tokens with the prefix cache rules on the captured schedule"
    ),
    "run": Subcommand(
        "sim.engine.runflags", "simulate latency and cached tokens of a trace with a fitted latency model"
    ),
    "what-if": Subcommand(
        "sim.forecast.flags.whatifflags",
        "forecast latency of a capture under another cache, rate or engine setting",
    ),
    "sweep": Subcommand(
        "sim.forecast.flags.sweepflags",
        "forecast latency and throughput at all points of a grid, and choose the cheapest setting",
    ),
    "search": Subcommand("sim.forecast.flags.searchflags", "smallest cache or highest rate that keeps a TTFT target"),
    "calibrate": Subcommand(
        "sim.forecast.flags.calibrateflags", "fit a latency model to captures, and validate it on others"
    ),
    "validate": Subcommand(
        "sim.forecast.flags.validateflags",
        "compare measured with forecast latency by quantile; gates for CI",
    ),
    "serve": Subcommand(
        "sim.serving.serveflags", "serve an OpenAI-compatible simulated engine with the latency model's times"
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run the subcommand that ``argv`` begins with."""
    description = "Predict cache hits and latency of a trace; fit, validate and serve a latency model."
    return run_subcommand("sim", description, COMMANDS, argv)


def command() -> None:
    """Entry point of the ``sim`` console script."""
    run_command("sim", main)


if __name__ == "__main__":
    command()
