"""``kvtape completion SHELL``: a script that completes commands, subcommands, flags, choices and files in a shell."""

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from kvtape.__main__ import COMMANDS, OWN
from tracefile.records.extras import load_extra

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
    printing = argparse.ArgumentParser.print_help
    argparse.ArgumentParser.print_help = show  # type: ignore[method-assign, assignment]
    try:
        with contextlib.suppress(SystemExit):
            main([*rest, "--help"])
    except HelpShown as shown:
        return shown.parser
    finally:
        argparse.ArgumentParser.print_help = printing  # type: ignore[method-assign]
    raise AssertionError(f"{command} --help showed no help")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the names of a command's subcommands, and the work of each where its help tells."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    told = {choice.dest: choice.help or "" for action in found for choice in action._choices_actions}
    return dict.fromkeys(getattr(parser, "_handled_before", ()), "") | told


def commands() -> Iterator[str]:
    """Yield every command that does something: ``tap``, ``loadgen``, ``loadgen sweep``, ``sim pool`` …"""
    for program in PROGRAMS:
        parser = parser_of(program)
        if parser._subparsers is None:
            yield program
        yield from (f"{program} {name}" for name in subcommands(parser))
    yield from (f"kvtape {name}" for name in OWN)


SHELLS = ("bash", "fish", "zsh")
FILES = ("TRACE", "OUT", "FILE", "DIR", "[LABEL=]FILE")
"""Values that name a file, also where a parser takes them as text."""
EPILOG = """\
examples:
  kvtape completion bash > ~/.local/share/bash-completion/completions/kvtape   # of the package bash-completion
  kvtape completion zsh > ~/.zfunc/_kvtape      # a folder of fpath
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
    """Print the script."""
    shtab = load_extra("shtab")
    parser = whole_parser(flags.program, shtab)
    parser.prog = flags.program
    print(shtab.complete(parser, flags.shell))
    return 0


def whole_parser(command: str, shtab: ModuleType) -> argparse.ArgumentParser:
    """Return a command's parser with those of all its subcommands, and paths marked for ``shtab``."""
    parser = parser_of(command)
    for action in parser._actions:
        if action.type is Path or (action.metavar or action.dest.upper()) in FILES:
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
        if action.help == argparse.SUPPRESS:  # taken, though another command's help shows it
            action.help = None
    names = subcommands(parser)
    if names:
        found = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        below = next(found, None) or argparse.ArgumentParser.add_subparsers(parser)
        for name, summary in names.items():
            if name not in below.choices:
                below.add_parser(name, help=summary)
            below.choices[name] = whole_parser(f"{command} {name}", shtab)
    return parser
