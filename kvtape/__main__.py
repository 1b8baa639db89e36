"""``kvtape COMMAND …``: every command of this package. Only the chosen one is imported."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import importlib
import sys
from collections.abc import Callable, Sequence

from tracefile.commandline.ending import run_command
from tracefile.commandline.parser import Parser

COMMANDS = {
    "tap": "record an engine's traffic without its content: a reverse proxy",
    "loadgen": "send synthetic load, and record what came back",
    "replay": "send a captured trace as load to any engine",
    "sim": "predict cache hits and latency from a trace",
    "report": "compare traces: tables, gates and pages",
    "tracefile": "inspect, check, convert, join and scale traces",
}


def main(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` begins with."""
    parser = Parser(prog="kvtape", description="Record LLM traffic without its content, replay it, predict its cache.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    if argv and argv[0] in COMMANDS:
        return chosen(argv[0])(argv[1:])
    parser.parse_args(argv)
    return 0


def chosen(name: str) -> Callable[[Sequence[str]], int]:
    """The ``main`` of a command."""
    found: Callable[[Sequence[str]], int] = importlib.import_module(f"{name}.__main__").main
    return found


def command() -> None:
    """Entry point of the ``kvtape`` command; an error names the command that it comes from."""
    argv = sys.argv[1:]
    if argv and argv[0] in COMMANDS:
        run_command(argv[0], chosen(argv[0]), argv[1:])
    run_command("kvtape", main, argv)


if __name__ == "__main__":
    command()
