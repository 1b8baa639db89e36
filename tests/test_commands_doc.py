"""docs/commands.md is made of the commands' own help, and the command lines of every page are ones that they take."""

import argparse
import re
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path

import pytest

from kvtape.__main__ import OWN
from kvtape.parsers import PROGRAMS, commands, parser_of
from scripts.commands_page import PAGE, examples_of, flags_of, help_of, page, row
from tracefile.commandline.parser import FLAGS

ROOT = Path(__file__).parent.parent
COMMANDS = list(commands())
PAGES = sorted(
    path for folder in (".", "docs", "docs/dev", "deploy", "data/captures") for path in (ROOT / folder).glob("*.md")
)


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.commands_page"


@cache
def parser(command: str) -> argparse.ArgumentParser:
    return parser_of(command)


UNSAID = {"...", "$T", "$DOOR"}


def command_lines(text: str) -> Iterator[list[str]]:
    """Commands of ours in a page's blocks of shell, without redirections, comments and ``kvtape`` before others."""
    for block in re.findall(
        r"^ *```sh\n(.*?)^ *```", re.sub(r"<<'END'.*?^ *END$", "", text, flags=re.M | re.S), re.M | re.S
    ):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            for operator, words in groupby(lexer, key=lambda word: re.fullmatch(r"[;&|<>]+", word) is not None):
                named = list(dropwhile(lambda word: word in ("sudo", "kvtape"), words))
                if not operator and named[:1] and named[0] in (*PROGRAMS, *OWN) and not UNSAID & set(named):
                    yield ["kvtape", *named] if named[0] in OWN else named


def without_config(words: list[str]) -> list[str]:
    """Words without ``--config FILE``: a page's file is not there."""
    at = words.index("--config") if "--config" in words else len(words)
    return words[:at] + words[at + 2 :]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_are_taken(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    for words in command_lines(path.read_text()):
        command = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        try:
            parser(command).parse_args(without_config(words[len(command.split()) :]))
        except SystemExit as exited:
            if exited.code:
                refused.append((shlex.join(words), capsys.readouterr().err))
    assert not refused


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_of_the_command(command: str) -> None:
    """The page shows them, so that the test above has the command take them."""
    examples = examples_of(parser(command))
    assert parser(command).format_help().endswith(f"examples:\n{examples}")
    first = next(command_lines(f"```sh\n{examples}```"))
    assert first[: len(command.split())] == command.split()
    assert f"```sh\n{textwrap.dedent(examples)}```" in PAGE.read_text()


COUNTED = re.compile(
    r"\b(tokens?|TOKENS|blocks?|requests?|responses|records?|sessions?|conversations|turns?|documents|examples|groups|"
    r"adapters|engines|slots|GPUs?|processes|parts|steps|points|runs?|checks|members|forecasts|draws|resamples|prefixes|"
    r"MB|KB|GB|GiB|bytes|ms|seconds|times|share|multiple|seed|id|shape|temperature|price)\b"
)
"""Nouns and units of numbers."""
TIME_WITH_UNIT = re.compile(r"\b\d[\d.]*(ms|s|m|h|d)\b")
PLAIN = re.compile(
    r"(URL|FILE|DIR|PATH|TRACE|OUT|PAGE|NAME|MODEL|TEXT|WORD|LABEL|COMMAND|RULE|WHEN|HOW|[A-Z]),?…?|[\w-]+(\\\|[\w-]+)+"
)
"""Values that need no example: places, names, counts, and words that the help lists."""
UNTOLD = (None, [], argparse.SUPPRESS, "auto")
"""Defaults in words: the command finds the value."""
SHOWN = re.compile(r"such as|as in|, as |default \w|\w=\w")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_tells_its_default_unit_and_form(command: str) -> None:
    """Each value has its default or ``required``; a number its noun, a time a unit, any other form an example."""
    made, missing = parser(command), []
    for action in flags_of(made):
        if action.nargs == 0 or action.help == argparse.SUPPRESS:
            continue
        text, form = help_of(made, action), row(made, action).split("`")[1].rpartition(" ")[2]
        own = action.default
        told = {
            "its default": re.search(r"\bdefault\b|\brequired\b", text),
            "the parser's default": own in UNTOLD or f"default {shown_as(own)}" in text,
            "a time with its unit": "TIME" not in form or TIME_WITH_UNIT.search(text),
            "a noun for the number": action.type not in (int, float) or COUNTED.search(f"{form} {text}"),
            "an example": action.choices or action.type or PLAIN.fullmatch(form) or SHOWN.search(text),
        }
        missing += [f"{action.option_strings[0]} {name}: {text}" for name, found in told.items() if not found]
    assert not missing


def shown_as(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_no_page_names_a_flag_of_earlier_commits() -> None:
    known = {flag for command in COMMANDS for action in flags_of(parser(command)) for flag in action.option_strings}
    old = {name.rpartition(" ")[2] for name in FLAGS} - known
    named = {
        path.name: old & set(re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text()))
        for path in PAGES
        if path.parent.name != "dev"
    }
    assert not {name: flags for name, flags in named.items() if flags and name not in ("CHANGELOG.md", "index.md")}
