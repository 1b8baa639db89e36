"""``kvtape COMMAND …``: all commands. Only the given command is imported."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tracefile.commandline.exit_codes import run_command
from tracefile.commandline.subcommands import Subcommand, run_subcommand

COMMANDS = {
    "tap": Subcommand("tap.__main__", "record an engine's traffic without its content: a reverse proxy"),
    "loadgen": Subcommand("loadgen.__main__", "send synthetic load, and record the responses"),
    "replay": Subcommand("replay.__main__", "send a captured trace as load to any engine"),
    "sim": Subcommand("sim.__main__", "predict prefix-cache hits and latency from a trace"),
    "report": Subcommand("report.__main__", "compare traces: tables, gates and pages"),
    "tracefile": Subcommand("tracefile.__main__", "inspect, check, print and convert traces"),
}


KVTAPE_COMMANDS = {
    "init": Subcommand("kvtape.initflags", "write a TOML file with flags for the engine on this machine"),
    "doctor": Subcommand("kvtape.doctorflags", "check this machine and an engine before a capture, and print fixes"),
    "completion": Subcommand("kvtape.completion", "print a shell completion script"),
}
"""Subcommands of ``kvtape`` only."""


def main(argv: Sequence[str]) -> int:
    """Run the command in ``argv``."""
    if argv and argv[0] in COMMANDS:
        return main_of(argv[0])(argv[1:])
    description = "Record LLM traffic without its content, replay it, predict its prefix cache."
    return run_subcommand("kvtape", description, COMMANDS | KVTAPE_COMMANDS, argv)


def main_of(name: str) -> Callable[[Sequence[str]], int]:
    """Import a command and return its ``main``."""
    command_main: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[name].module).main
    return command_main


def command(program: str = "kvtape") -> NoReturn:
    """Run ``program``, or the command after ``kvtape``; an error has the command's name."""
    words = [*([] if program == "kvtape" else [program]), *sys.argv[1:]]
    if words and words[0] in COMMANDS:
        run_command(words[0], main_of(words[0]), words[1:])
    run_command("kvtape", main, words)


if __name__ == "__main__":
    command()
