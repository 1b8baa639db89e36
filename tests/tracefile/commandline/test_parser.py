"""A mistake on the command line gets one line that names the nearest right word, and exit code 2."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from tracefile.commandline.durations import duration
from tracefile.commandline.parser import VERSION, Parser, seed


def parser() -> Parser:
    made = Parser(prog="tool")
    commands = made.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("trace")
    run.add_argument("-o", "--output", required=True)
    run.add_argument("--wait", type=duration, default="30s")
    run.add_argument("--dialect", choices=["vllm", "sglang", "llamacpp"])
    run.add_argument("--number", type=int, default=-1)
    run.add_argument("--seed", type=seed)
    run.add_argument("--json", action="store_true")
    commands.add_parser("search")
    return made


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exited:
        parser().parse_args(argv)
    captured = capsys.readouterr()
    assert (exited.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    return captured.err.rstrip("\n")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run", "--wiat", "5s"], "tool run: error: --wiat: no such flag; did you mean --wait?"),
        (["run", "--outp=a", "t"], "tool run: error: --outp: no such flag; did you mean --output?"),
        (["run", "--zzz"], "tool run: error: --zzz: no such flag; see tool run --help"),
        (["run", "--blocks", "3"], "tool run: error: --blocks: no such flag; see tool run --help"),
        (["run", "t"], "tool run: error: missing: -o/--output; see tool run --help"),
        (["run", "t", "-o"], "tool run: error: -o/--output: expected one argument"),
        (["run", "t", "-o", "a", "--wait", "3"], "'3' has no unit; expected 3s, 3ms, 3m or 3h"),
        (["run", "t", "-o", "a", "--wait", "-3s"], "tool run: error: --wait: '-3s'; expected a number and its unit"),
        (
            ["run", "t", "-o", "a", "--seed", "-1"],
            "--seed: '-1'; expected a whole number from 0 to 9223372036854775807",
        ),
        (["run", "t", "-o", "a", "--number", "x"], "tool run: error: --number: 'x'; expected a whole number"),
        (
            ["run", "t", "-o", "a", "--number", "9223372036854775808"],
            "--number: '9223372036854775808'; expected at most 9223372036854775807",
        ),
        (["run", "t", "-o", "a", "--dialect", "vlm"], "expected one of vllm, sglang, llamacpp; did you mean vllm?"),
        (["run", "t", "-o", "a", "more"], "tool run: error: 'more': one argument too many; see tool run --help"),
        (
            ["run", "t", "-o", "a", "--json", "b"],
            "--json takes no file, its object goes to stdout; expected --json > b",
        ),
        (["rum"], "tool: error: rum: no such command; did you mean run?"),
        (["xyz"], "tool: error: xyz: no such command; expected one of run, search"),
        ([], "tool: error: missing: command; see tool --help"),
        (["--jsn", "run"], "tool: error: --jsn: no such flag; see tool --help"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *argv)


def test_a_flag_is_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--out: no such flag; did you mean --output?" in refusal(capsys, "run", "t", "--out", "a")


def test_values_that_look_like_flags_are_values() -> None:
    found = parser().parse_args(["run", "-oa", "--number", "-3", "--wait=1m", "--", "--odd"])
    assert (found.output, found.number, found.wait, found.trace) == ("a", -3, 60.0, "--odd")


def test_a_default_duration_is_read_as_a_given_one() -> None:
    assert parser().parse_args(["run", "t", "-o", "a"]).wait == 30.0


@pytest.mark.parametrize("argv", [["--version"], ["run", "--version"]])
def test_every_parser_tells_the_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parser().parse_args(argv)
    assert (exited.value.code, capsys.readouterr().out) == (0, f"kvtape {VERSION}\n")


def test_a_command_that_the_program_handles_itself_is_known_by_its_old_name(capsys: pytest.CaptureFixture[str]) -> None:
    made = Parser(prog="loadgen", commands=["sweep"])
    made.add_argument("--url", required=True)
    for word, said in {
        "calibrate": "loadgen: error: loadgen calibrate is now python -m scripts.bench_loadgen, in a clone\n",
        "sweeep": "loadgen: error: sweeep: no such command; did you mean sweep?\n",
    }.items():
        with pytest.raises(SystemExit):
            made.parse_args([word])
        assert capsys.readouterr().err == said


def test_help_tells_forms_and_defaults_of_values_and_keeps_the_lines_of_examples() -> None:
    made = Parser(prog="tool", description="words " * 30, epilog="examples:\n  tool t --wait 5s\n  tool u\n")
    made.add_argument("trace", help="read")
    made.add_argument("--wait", type=duration, default="30s", help="wait")
    made.add_argument("--share", type=float, default=1.0, help="share of all, such as 50%% (docs/a.md)")
    made.add_argument("--number", type=int, required=True, help="number")
    made.add_argument("--also", action="append", default=[], help="another")
    made.add_argument("--model", help="model (default: the engine's)")
    made.add_argument("--json", action="store_true", help="one object")
    shown = " ".join(made.format_help().split())
    for words in (
        "TRACE read",
        "--wait TIME wait (default 30s)",
        "--share X share of all, such as 50% (docs/a.md; default 1)",
        "--number N number (required)",
        "--also ALSO another (default: none)",
        "--model MODEL model (default: the engine's)",
        "--json one object",
    ):
        assert words in shown
    assert made.format_help().endswith("examples:\n  tool t --wait 5s\n  tool u\n")
    assert max(map(len, made.format_help().splitlines())) <= 120


def test_a_later_argparse_may_give_subcommands_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14.8 gives ``color``: every command that has subcommands ended with a TypeError."""
    given: dict[str, object] = {}
    usual = argparse.ArgumentParser.__init__

    def later(self: argparse.ArgumentParser, *words: Any, color: object = None, **settings: Any) -> None:
        usual(self, *words, **settings)
        given["color"] = color

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", later)
    Parser("tracefile").add_subparsers().add_parser("cat", color=False)
    assert given == {"color": False}


def test_a_rare_setting_is_given_in_a_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tap")
    parser.add_setting("--backlog", type=int, default=128, help="connections that wait")
    (tmp_path / "tap.toml").write_text("[tap]\nbacklog = 7\n")
    assert parser.parse_args(["--config", str(tmp_path / "tap.toml")]).backlog == 7
    assert "backlog" not in parser.format_help()
    assert parser.config_only == {"--backlog": "connections that wait (default 128)"}
    with pytest.raises(SystemExit):
        parser.parse_args(["--backlog", "7"])
    assert "--backlog: a rare setting; expected backlog in [tap] of a --config file" in capsys.readouterr().err
