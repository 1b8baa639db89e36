"""``kvtape completion SHELL``: shell completion of commands, subcommands, flags, choices and files."""

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from kvtape.__main__ import COMMANDS, KVTAPE_COMMANDS
from tracefile.records.extras import load_extra

PROGRAMS = tuple(COMMANDS)


class HelpShown(Exception):  # noqa: N818
    """Raised instead of printing help, with the parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser that prints ``COMMAND --help``."""

    def show(parser: argparse.ArgumentParser, file: object = None) -> None:
        raise HelpShown(parser)

    package, *subcommand = command.split()
    main = importlib.import_module(f"{package}.__main__").main
    print_help = argparse.ArgumentParser.print_help
    argparse.ArgumentParser.print_help = show  # type: ignore[method-assign, assignment]
    try:
        with contextlib.suppress(SystemExit):
            main([*subcommand, "--help"])
    except HelpShown as shown:
        return shown.parser
    finally:
        argparse.ArgumentParser.print_help = print_help  # type: ignore[method-assign]
    raise AssertionError(f"{command} --help showed no help")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the subcommands of a command, with their summaries."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    summaries = {choice.dest: choice.help or "" for action in actions for choice in action._choices_actions}
    return dict.fromkeys(getattr(parser, "_handled_before", ()), "") | summaries


def commands() -> Iterator[str]:
    """Yield every command with its subcommand: ``tap``, ``loadgen``, ``loadgen sweep``, ``sim pool`` …"""
    for program in PROGRAMS:
        parser = parser_of(program)
        if parser._subparsers is None:
            yield program
        yield from (f"{program} {name}" for name in subcommands(parser))
    yield from (f"kvtape {name}" for name in KVTAPE_COMMANDS)


SHELLS = ("bash", "fish", "zsh")
FILES = ("TRACE", "OUT", "FILE", "DIR", "[LABEL=]FILE")
"""Metavars of files and folders, even if the parser reads them as text."""
EPILOG = """\
examples:
  kvtape completion bash > ~/.local/share/bash-completion/completions/kvtape   # needs the package bash-completion
  kvtape completion zsh > ~/.zfunc/_kvtape      # a folder in fpath
  kvtape completion fish --for sim > ~/.config/fish/completions/sim.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``kvtape completion``."""
    parser.add_argument("shell", choices=SHELLS, help=", ".join(SHELLS))
    parser.add_argument(
        "--for",
        dest="program",
        choices=("kvtape", *PROGRAMS),
        default="kvtape",
        metavar="COMMAND",
        help=f"kvtape, or a command without it: {', '.join(PROGRAMS)}",
    )


def run(flags: argparse.Namespace) -> int:
    """Print the completion script."""
    shtab = load_extra("shtab")
    parser = complete_parser(flags.program, shtab)
    parser.prog = flags.program
    print(shtab.complete(parser, flags.shell))
    return 0


def complete_parser(command: str, shtab: ModuleType) -> argparse.ArgumentParser:
    """Return a command's parser with the parsers of all subcommands, and file arguments marked for ``shtab``."""
    parser = parser_of(command)
    for action in parser._actions:
        if action.type is Path or (action.metavar or action.dest.upper()) in FILES:
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
        if action.help == argparse.SUPPRESS:  # a hidden flag that another command's help shows
            action.help = None
    names = subcommands(parser)
    if names:
        actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        subparsers = next(actions, None) or argparse.ArgumentParser.add_subparsers(parser)
        for name, summary in names.items():
            if name not in subparsers.choices:
                subparsers.add_parser(name, help=summary)
            subparsers.choices[name] = complete_parser(f"{command} {name}", shtab)
    return parser
