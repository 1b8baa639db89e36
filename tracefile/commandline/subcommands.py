"""Subcommands of a command, each a module with ``add_arguments``, ``run`` and, if it has one, an ``EPILOG``.

Only the module of the subcommand on the command line is imported; its ``run`` imports the work (docs/dev/startup.md).
"""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from tracefile.commandline.parser import Parser


class Subcommand(NamedTuple):
    """A subcommand's module, and its work in a line."""

    module: str
    summary: str


def run_subcommand(prog: str, description: str, commands: Mapping[str, Subcommand], argv: Sequence[str]) -> int:
    """Parse ``argv``, hand the chosen subcommand its arguments, and return its exit code."""
    parser = Parser(prog=prog, description=description)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen: ModuleType | None = None
    for name, command in commands.items():
        if argv and argv[0] == name:
            chosen = importlib.import_module(command.module)
            epilog = getattr(chosen, "EPILOG", None)
            subparser = subparsers.add_parser(name, help=command.summary, description=command.summary, epilog=epilog)
            chosen.add_arguments(subparser)
        else:
            subparsers.add_parser(name, help=command.summary)
    arguments = parser.parse_args(argv)
    if chosen is None:  # a flag before the command, which has none of its own
        parser.error(f"{argv[0]}: expected a command before it")
    code: int = chosen.run(arguments)
    return code
