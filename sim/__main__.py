"""``sim``: effects of a prefix cache on a trace. Each subcommand is a module with ``add_arguments`` and ``run``.

Only the module of the subcommand on the command line is imported, so that ``sim pool`` imports neither FastAPI nor
numba.
"""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import importlib
from collections.abc import Sequence
from types import ModuleType

from tracefile.commandline.ending import run_command
from tracefile.commandline.parser import Parser

COMMANDS: dict[str, tuple[str, str]] = {
    "pool": ("sim.cache.pool", "prefix hits of a trace in a block pool of one size"),
    "curve": ("sim.cache.curve", "prefix hits of a trace at every cache size, in one pass"),
    "misses": ("sim.cache.misses", "causes of cache misses at one size, and evictions by group"),
    "reuse": ("sim.cache.reuse", "times between uses of a block, and blocks used per time window"),
    "audit": ("sim.fit.audit", "compare reported cached tokens with the rules of the cache on the captured schedule"),
    "run": ("sim.engine.run", "predict a trace's times and cached tokens with a fitted model"),
    "what-if": (
        "sim.forecast.whatif",
        "forecast a capture under another cache, rate or setting, beside the capture as it was",
    ),
    "search": ("sim.forecast.search", "smallest cache or highest rate that keeps a TTFT target"),
    "calibrate": ("sim.forecast.calibrate", "fit a latency model to captures and validate it on others, in one go"),
    "fit": ("sim.fit.fit", "fit a latency model to captured traces"),
    "validate": (
        "sim.forecast.validate",
        "compare captures with forecasts of them, quantile by quantile; gates for CI",
    ),
    "watch": (
        "sim.watch.watch",
        "hold a model to live traffic: its pace, TTFT predicted and seen, other cache sizes, an alarm when it drifts",
    ),
    "serve": ("sim.serving.serve", "serve an OpenAI-compatible simulated engine with the latency model's times"),
}


def main(argv: Sequence[str]) -> int:
    """Parse ``argv``, hand the chosen subcommand its arguments, and return its exit code."""
    parser = Parser(
        prog="sim", description="Predict cache hits and latency of a trace; fit, validate and serve a latency model."
    )
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen: ModuleType | None = None
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subcommands.add_parser(name, help=summary, description=summary)
        if argv and argv[0] == name:
            chosen = importlib.import_module(module_name)
            chosen.add_arguments(subparser)
    arguments = parser.parse_args(argv)
    if chosen is None:  # a flag before the command, which has none of its own
        parser.error(f"{argv[0]}: expected a command before it")
    code: int = chosen.run(arguments)
    return code


def command() -> None:
    """Entry point of the ``sim`` console script."""
    run_command("sim", main)


if __name__ == "__main__":
    command()
