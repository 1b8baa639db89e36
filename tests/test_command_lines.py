"""Every command and subcommand: a mistake is one line that names the right word, and exit code 2; ``--version``."""

import importlib
from collections.abc import Sequence

import pytest

from tests.test_commands_doc import COMMANDS
from tracefile.commandline.version import VERSION

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
def test_every_command_tells_its_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(command, ["--version"], capsys) == (0, f"kvtape {VERSION}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_flag_is_one_line_even_where_more_is_missing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(command, ["--versoin"], capsys)
    assert said == f"{command}: error: --versoin: no such flag; did you mean --version?"


@pytest.mark.parametrize(
    ("program", "word", "said"),
    [
        ("kvtape", "tracfile", "did you mean tracefile?"),
        ("sim", "curv", "did you mean curve?"),
        ("sim", "whatif", "did you mean what-if?"),
        ("report", "comparison", "did you mean compare?"),
        ("tracefile", "convrt", "did you mean convert?"),
        ("tracefile", "xyz", "expected one of info, check, convert, join, synthesize"),
        ("loadgen", "selftets", "did you mean selftest?"),
        ("loadgen", "calibrate", "loadgen calibrate is now loadgen selftest"),
    ],
)
def test_an_unknown_command_is_one_line(program: str, word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(program, [word], capsys).endswith(said)


@pytest.mark.parametrize("program", ["kvtape", "sim", "report", "tracefile"])
def test_a_missing_command_is_one_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing: " in refusal(program, [], capsys)
