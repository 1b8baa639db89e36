"""docs/commands.md is made of the commands' own help, and the command lines of every page are ones that they take."""

import argparse
import re
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import dropwhile, groupby
from pathlib import Path

import pytest

from kvtape.__main__ import KVTAPE_COMMANDS
from kvtape.completion import PROGRAMS, commands, parser_of
from scripts.commands_page import PAGE, examples_of, flags_of, page
from tests.doccommands import PAGES, ROOT, USER_PAGES, is_known, lines, without_config
from tracefile.commandline.parser import removed

COMMANDS = list(commands())


def test_commands_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.commands_page"


@cache
def parser(command: str) -> argparse.ArgumentParser:
    return parser_of(command)


UNSAID = {"...", "$T", "$DOOR"}


def command_lines(text: str) -> Iterator[list[str]]:
    """Commands of ours in a page's blocks of shell, without redirections, comments and ``kvtape`` before others."""
    for line in lines(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for operator, words in groupby(lexer, key=lambda word: re.fullmatch(r"[;&|<>]+", word) is not None):
            named = list(dropwhile(lambda word: word in ("sudo", "kvtape"), words))
            if not operator and named[:1] and named[0] in (*PROGRAMS, *KVTAPE_COMMANDS) and not UNSAID & set(named):
                yield ["kvtape", *named] if named[0] in KVTAPE_COMMANDS else named


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_parse(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "my.py").write_text("def choose(request, engines):\n    return 0\n")
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


def test_programs_in_user_pages_are_known() -> None:
    assert not {line for page in USER_PAGES for line in lines(page.read_text()) if not is_known(line)}


def test_scripts_and_make_targets_in_pages_exist() -> None:
    text = "\n".join(line for page in PAGES for line in lines(page.read_text()))
    modules = set(re.findall(r"python -m (scripts\.[\w.]+)", text))
    targets = set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE))
    assert modules
    assert targets
    assert not [name for name in modules if find_spec(name) is None]
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_pages_have_no_removed_flags() -> None:
    known = {flag for command in COMMANDS for action in flags_of(parser(command)) for flag in action.option_strings}
    old = {flag for flags in removed("flags").values() for flag in flags} - known
    named = {
        path.name: old & set(re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text()))
        for path in PAGES
        if path.parent.name != "dev"
    }
    rest = ("CHANGELOG.md", "index.md", "accuracy.md")  # accuracy.md: lm_eval's own flags
    assert not {name: flags for name, flags in named.items() if flags and name not in rest}
