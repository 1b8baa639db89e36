"""docs/commands.md is made of the commands' own help, and the command lines of every page are ones that they take."""

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path

import pytest

from kvtape.parsers import PROGRAMS, commands, parser_of
from scripts.commands_page import PAGE, flags_of, page
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


def command_lines(text: str) -> Iterator[list[str]]:
    """Commands of ours in a page's blocks of shell, without redirections, comments and ``kvtape``."""
    for block in re.findall(
        r"^ *```sh\n(.*?)^ *```", re.sub(r"<<'END'.*?^ *END$", "", text, flags=re.M | re.S), re.M | re.S
    ):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            for operator, words in groupby(lexer, key=lambda word: re.fullmatch(r"[;&|<>]+", word) is not None):
                named = list(dropwhile(lambda word: word in ("sudo", "kvtape"), words))
                if not operator and named[:1] and named[0] in PROGRAMS and not {"...", "$T", "$DOOR"} & set(named):
                    yield named


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_are_taken(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    for words in command_lines(path.read_text()):
        command = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        try:
            parser(command).parse_args(words[len(command.split()) :])
        except SystemExit as exited:
            if exited.code:
                refused.append((shlex.join(words), capsys.readouterr().err))
    assert not refused


def test_no_page_names_a_flag_of_earlier_commits() -> None:
    known = {flag for command in COMMANDS for action in flags_of(parser(command)) for flag in action.option_strings}
    old = {name.rpartition(" ")[2] for name in FLAGS} - known
    named = {
        path.name: old & set(re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text()))
        for path in PAGES
        if path.parent.name != "dev"
    }
    assert not {name: flags for name, flags in named.items() if flags and name not in ("CHANGELOG.md", "index.md")}
