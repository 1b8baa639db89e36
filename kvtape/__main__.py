"""``kvtape COMMAND …``: every command of this package. Only the chosen one is imported."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tracefile.commandline.exit_codes import run_command
from tracefile.commandline.subcommands import Subcommand, run_subcommand

COMMANDS = {
    "tap": Subcommand("tap.__main__", "record an engine's traffic without its content: a reverse proxy"),
    "loadgen": Subcommand("loadgen.__main__", "send synthetic load, and record what came back"),
    "replay": Subcommand("replay.__main__", "send a captured trace as load to any engine"),
    "sim": Subcommand("sim.__main__", "predict cache hits and latency from a trace"),
    "report": Subcommand("report.__main__", "compare traces: tables, gates and pages"),
    "tracefile": Subcommand("tracefile.__main__", "inspect, check, convert, join and scale traces"),
}


OWN = {
    "init": Subcommand("kvtape.initflags", "write a TOML file of flags for the engine that runs on this machine"),
    "doctor": Subcommand(
        "kvtape.doctorflags", "check this machine and an engine before a capture, and say what to fix"
    ),
    "completion": Subcommand("kvtape.completion", "print a script that completes commands and flags in a shell"),
}
"""Subcommands that kvtape alone has."""


def main(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` begins with."""
    if argv and argv[0] in COMMANDS:
        return chosen(argv[0])(argv[1:])
    description = "Record LLM traffic without its content, replay it, predict its cache."
    return run_subcommand("kvtape", description, COMMANDS | OWN, argv)


def chosen(name: str) -> Callable[[Sequence[str]], int]:
    """The ``main`` of a command."""
    found: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[name].module).main
    return found


def command(program: str = "kvtape") -> NoReturn:
    """Run ``program``, or the command that ``kvtape`` is given, which an error then names."""
    words = [*([] if program == "kvtape" else [program]), *sys.argv[1:]]
    if words and words[0] in COMMANDS:
        run_command(words[0], chosen(words[0]), words[1:])
    run_command("kvtape", main, words)


if __name__ == "__main__":
    command()
