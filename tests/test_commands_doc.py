"""docs/commands.md names every flag of every command, and no other."""

import argparse
import contextlib
import importlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
COMMANDS = [
    "tap",
    "loadgen",
    "loadgen selftest",
    "replay",
    *(
        f"sim {name}"
        for name in (
            "pool",
            "curve",
            "misses",
            "reuse",
            "audit",
            "fit",
            "run",
            "calibrate",
            "validate",
            "serve",
            "what-if",
            "search",
        )
    ),
    "report compare",
    "report curve",
    *(f"tracefile {name}" for name in ("info", "check", "convert", "join", "synthesize")),
]


class HelpShown(Exception):  # noqa: N818 - not an error: how a parser reaches the test
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser that answers ``COMMAND --help``."""

    def show(parser: argparse.ArgumentParser, file: object = None) -> None:
        raise HelpShown(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "print_help", show)
    package, *rest = command.split()
    main = importlib.import_module(f"{package}.__main__").main
    with contextlib.suppress(SystemExit):
        try:
            main([*rest, "--help"])
        except HelpShown as shown:
            return shown.parser
    raise AssertionError(f"{command} --help showed no help")


def flags_of(actions: Sequence[argparse.Action]) -> set[str]:
    return {flag for action in actions for flag in action.option_strings} - {"-h", "--help", "--version"}


def documented_flags(command: str) -> set[str]:
    """Flags in the first column of the section's table."""
    section = re.search(rf"^##+ `{re.escape(command)}`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/commands.md has no section `{command}`"
    first_cells = re.findall(r"^\| (`-.*?`) \|", section[1], re.MULTILINE)
    return {flag for cell in first_cells for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", cell)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_documented_and_every_documented_flag_exists(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = parser_of(command, monkeypatch)
    assert documented_flags(command) == flags_of(parser._actions)
