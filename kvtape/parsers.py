"""Parsers of every command, as ``COMMAND --help`` makes them."""

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from unittest import mock

from kvtape.__main__ import COMMANDS, OWN

PROGRAMS = tuple(COMMANDS)


class HelpShown(Exception):  # noqa: N818
    """Raised in place of printing help, with the parser that would print it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser that prints ``COMMAND --help``."""

    def show(parser: argparse.ArgumentParser, file: object = None) -> None:
        raise HelpShown(parser)

    package, *rest = command.split()
    main = importlib.import_module(f"{package}.__main__").main
    with mock.patch.object(argparse.ArgumentParser, "print_help", show), contextlib.suppress(SystemExit):
        try:
            main([*rest, "--help"])
        except HelpShown as shown:
            return shown.parser
    raise AssertionError(f"{command} --help showed no help")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the names of a command's subcommands, and the work of each where its help tells."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    told = {choice.dest: choice.help or "" for action in found for choice in action._choices_actions}
    return dict.fromkeys(getattr(parser, "_handled_before", ()), "") | told


def commands() -> Iterator[str]:
    """Yield every command that does something: ``tap``, ``loadgen``, ``loadgen selftest``, ``sim pool`` …"""
    for program in PROGRAMS:
        parser = parser_of(program)
        if parser._subparsers is None:
            yield program
        yield from (f"{program} {name}" for name in subcommands(parser))
    yield from (f"kvtape {name}" for name in OWN)
