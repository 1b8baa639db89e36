"""Every command and subcommand: a mistake is one line that names the right word, and exit code 2; ``--version``."""

import importlib
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from kvtape.completion import commands, parser_of
from tracefile.commandline.parser import VERSION, removed

COMMANDS = list(commands())
FLAGS = {f"{command} {flag}": text for command, flags in removed("flags").items() for flag, text in flags.items()}
PROGRAMS = ["kvtape", "tap", "loadgen", "replay", "sim", "report", "tracefile"]


def outcome(command: str, argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of ``COMMAND argv``."""
    program, *rest = command.split()
    main = importlib.import_module(f"{program}.__main__").main
    capsys.readouterr()
    with pytest.raises(SystemExit) as exited:
        main([*rest, *argv])
    return (exited.value.code, *capsys.readouterr())


def refusal(command: str, argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command line is answered with."""
    code, out, err = outcome(command, argv, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.rstrip("\n")


@pytest.mark.parametrize("command", [*PROGRAMS, *COMMANDS])
def test_every_command_has_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(command, ["--version"], capsys) == (0, f"kvtape {VERSION}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_flag_is_reported_before_missing_arguments(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(command, ["--versoin"], capsys)
    assert message == f"{command}: error: --versoin: no such flag; did you mean --version?"


@pytest.mark.parametrize(
    ("program", "word", "message"),
    [
        ("kvtape", "tracfile", "did you mean tracefile?"),
        ("sim", "curv", "did you mean curve?"),
        ("sim", "whatif", "did you mean what-if?"),
        ("report", "comparison", "did you mean compare?"),
        ("tracefile", "convrt", "did you mean convert?"),
        ("tracefile", "xyz", "expected one of info, check, cat, convert"),
        (
            "report",
            "drift",
            "is now tracefile convert --from --until and a model for each window",
        ),
        ("tracefile", "ls", "is now tracefile info of each trace, or DuckDB over all (docs/python.md)"),
        ("loadgen", "sweeep", "did you mean sweep?"),
        ("loadgen", "calibrate", "loadgen calibrate is now python -m scripts.bench_loadgen, in a clone"),
    ],
)
def test_an_unknown_command_is_one_line(
    program: str, word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(program, [word], capsys).endswith(message)


@pytest.mark.parametrize("program", ["kvtape", "sim", "report", "tracefile"])
def test_a_missing_command_is_one_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing: " in refusal(program, [], capsys)


@pytest.mark.parametrize("key", FLAGS)
def test_removed_flag_error_has_its_replacement(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, flag = key.rpartition(" ")
    assert refusal(command, [flag], capsys).startswith(f"{command}: error: {flag}: {FLAGS[key]}")


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        ("loadgen", ["--timeout", "60"], "--timeout: '60' has no unit; expected 60s, 60ms, 60m or 60h"),
        (
            "loadgen",
            ["--url", "http://x", "-o", "t", "--json", "s.json"],
            "--json takes no file, its object goes to stdout; expected --json > s.json",
        ),
    ],
)
def test_wrong_value_error_suggests_a_valid_value(
    command: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(command, argv, capsys) == f"{command}: error: {message}"


def test_replacements_are_existing_flags() -> None:
    """A rename of a rename must not leave a line that names a flag that is gone."""
    flags = {flag for command in COMMANDS for action in parser_of(command)._actions for flag in action.option_strings}
    named = {flag for text in FLAGS.values() for flag in re.findall(r"--[\w-]+", text)}
    assert named - flags == set()


HELPED = """
import contextlib, importlib, io, sys
told = set()
for command in COMMANDS:
    program, *rest = command.split()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(f"{program}.__main__").main([*rest, "--help"])
    new = HEAVY & sys.modules.keys() - told
    told |= new
    if new:
        print(f"{command} --help imports {', '.join(sorted(new))}")
"""
ONLY_ON_USE = {
    *("asyncio", "fastapi", "fsspec", "httpx", "jinja2", "multiprocessing", "numba", "numpy", "plotly"),
    *("pyarrow", "ray", "rich", "scipy", "transformers", "unittest", "uvicorn", "uvloop"),
}


def test_help_imports_no_heavy_library() -> None:
    helped = [*PROGRAMS, *COMMANDS]
    code = f"COMMANDS, HEAVY = {helped}, {ONLY_ON_USE}{HELPED}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == ""
