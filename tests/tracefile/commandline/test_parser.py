"""A mistake on the command line gets one line that names the nearest right word, and exit code 2."""

from pathlib import Path

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
    ("argv", "message"),
    [
        (["run", "--wiat", "5s"], "tool run: error: --wiat: no such flag; did you mean --wait?"),
        (["run", "--zzz"], "tool run: error: --zzz: no such flag; see tool run --help"),
        (["run", "t"], "tool run: error: missing: -o/--output; see tool run --help"),
        (["run", "t", "-o", "a", "--wait", "3"], "'3' has no unit; expected 3s, 3ms, 3m or 3h"),
        (["run", "t", "-o", "a", "--dialect", "vlm"], "expected one of vllm, sglang, llamacpp; did you mean vllm?"),
        (["rum"], "tool: error: rum: no such command; did you mean run?"),
        ([], "tool: error: missing: command; see tool --help"),
    ],
)
def test_error_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, *argv)


def test_negative_values_are_not_flags() -> None:
    result = parser().parse_args(["run", "-oa", "--number", "-3", "--wait=1m", "--", "--odd"])
    assert (result.output, result.number, result.wait, result.trace) == ("a", -3, 60.0, "--odd")


@pytest.mark.parametrize("argv", [["--version"], ["run", "--version"]])
def test_every_parser_has_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parser().parse_args(argv)
    assert (exited.value.code, capsys.readouterr().out) == (0, f"kvtape {VERSION}\n")


def test_config_only_setting_is_rejected_as_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tap")
    parser.add_setting("--backlog", type=int, default=128, help="connections that wait")
    (tmp_path / "tap.toml").write_text("[tap]\nbacklog = 7\n")
    assert parser.parse_args(["--config", str(tmp_path / "tap.toml")]).backlog == 7
    assert "backlog" not in parser.format_help()
    assert parser.config_only == {"--backlog": "connections that wait (default 128)"}
    with pytest.raises(SystemExit):
        parser.parse_args(["--backlog", "7"])
    assert "--backlog: expected backlog in table [tap] of a --config file" in capsys.readouterr().err
