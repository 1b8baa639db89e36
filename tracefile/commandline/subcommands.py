"""Subcommands: modules with ``add_arguments``, ``run`` and an optional ``EPILOG``.

Only the module of the given subcommand is imported; its ``run`` imports the implementation (docs/dev/startup.md).
"""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from tracefile.commandline.parser import Parser


class Subcommand(NamedTuple):
    """Module of a subcommand, and its one-line summary."""

    module: str
    summary: str


def run_subcommand(prog: str, description: str, commands: Mapping[str, Subcommand], argv: Sequence[str]) -> int:
    """Parse ``argv``, run the subcommand and return its exit code."""
    parser = Parser(prog=prog, description=description)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module: ModuleType | None = None
    for name, command in commands.items():
        if argv and argv[0] == name:
            module = importlib.import_module(command.module)
            epilog = getattr(module, "EPILOG", None)
            subparser = subparsers.add_parser(name, help=command.summary, description=command.summary, epilog=epilog)
            module.add_arguments(subparser)
        else:
            subparsers.add_parser(name, help=command.summary)
    arguments = parser.parse_args(argv)
    if module is None:  # a flag before the subcommand
        parser.error(f"{argv[0]}: expected a subcommand before it")
    code: int = module.run(arguments)
    return code
