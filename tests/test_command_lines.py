"""Every command and subcommand: a mistake is one line that names the right word, and exit code 2; ``--version``."""

import importlib
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from kvtape.completion import commands, parser_of
from tracefile.commandline.parser import FLAGS, VERSION

COMMANDS = list(commands())
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
        ("tracefile", "xyz", "expected one of info, check, cat, convert, cut, anonymize, join, synthesize"),
        ("report", "drift", "is now a loop over parts of the trace and sim calibrate, one model for each"),
        ("tracefile", "ls", "is now tracefile info of each trace, or DuckDB over all as Parquet (docs/python.md)"),
        ("loadgen", "sweeep", "did you mean sweep?"),
        ("loadgen", "calibrate", "loadgen calibrate is now python -m scripts.bench_loadgen, in a clone"),
    ],
)
def test_an_unknown_command_is_one_line(program: str, word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(program, [word], capsys).endswith(said)


@pytest.mark.parametrize("program", ["kvtape", "sim", "report", "tracefile"])
def test_a_missing_command_is_one_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing: " in refusal(program, [], capsys)


# Old names that each command refuses, with the end of the line that it prints.
OLD = [
    ("tap", ["--trace", "t"], "--trace is now -o/--output"),
    ("tap", ["--balance", "session"], "--balance is now --route"),
    (
        "sim curve",
        ["t", "--blocks", "100"],
        "--blocks: it tells every size; expected sim pool --num-gpu-blocks N for one (null block included)",
    ),
    ("tap", ["--rotate-s", "60"], "--rotate-s is now --rotate-age"),
    ("tap", ["--wait-s", "60"], "--wait-s is now --wait"),
    ("tap", ["--drain-s=60"], "--drain-s is now --drain"),
    ("tap", ["--engine-metrics-s", "1"], "--engine-metrics-s is now --engine-metrics-interval"),
    ("loadgen", ["--trace", "t"], "--trace is now -o/--output"),
    ("loadgen", ["--dialect", "llama.cpp"], "--dialect: 'llama.cpp' is now 'llamacpp'"),
    ("loadgen", ["--dialect", "tensorrt-llm"], "--dialect: 'tensorrt-llm' is now 'trtllm'"),
    ("loadgen", ["--pattern", "calibrate"], "--pattern: 'calibrate' is now 'calibration'"),
    ("loadgen", ["--think-s", "1"], "--think-s is now --think"),
    (
        "loadgen",
        ["--lm-eval", "gsm8k"],
        "--lm-eval: gone; expected lm_eval --model local-completions through the tap: docs/recipes/accuracy.md",
    ),
    ("loadgen", ["--token-seed", "1"], "--token-seed is now --nonce"),
    ("loadgen", ["--burst-every-s", "1"], "--burst-every-s is now --burst-every"),
    ("loadgen", ["--step-s", "1"], "--step-s is now --step-duration"),
    ("loadgen", ["--timeout-s", "1"], "--timeout-s is now --timeout"),
    ("loadgen", ["--timeout", "60"], "--timeout: '60' has no unit; expected 60s, 60ms, 60m or 60h"),
    (
        "loadgen",
        ["--url", "http://x", "-o", "t", "--json", "s.json"],
        "--json takes no file, its object goes to stdout; expected --json > s.json",
    ),
    ("replay", ["--trace", "t"], "--trace is now -o/--output"),
    ("sim serve", ["--answer-tokens", "9"], "--answer-tokens is now --output-tokens"),
    ("sim calibrate", ["--frontend", "serial"], "--frontend is now --api-server"),
    ("replay", ["--no-splice"], "--no-splice is now --no-output-substitution"),
    ("replay", ["--max-think", "5"], "--max-think: '5' has no unit; expected 5s, 5ms, 5m or 5h"),
    (
        "sim run",
        ["--regret", "r.jsonl"],
        "--regret: gone; expected sim what-if with several --route, which compares their TTFT",
    ),
    ("sim run", ["--model", "m.json"], "--model is now --latency-model"),
    ("sim what-if", ["--kv-blocks", "9"], "--kv-blocks is now --num-gpu-blocks"),
    ("sim search", ["--smallest", "kv-blocks"], "--smallest is now --minimize"),
    ("sim search", ["--highest", "rate"], "--highest is now --maximize"),
    ("sim search", ["--minimize", "kv-blocks"], "--minimize: 'kv-blocks' is now 'num-gpu-blocks'"),
    ("sim search", ["--ttft", "p90<=1s"], "--ttft is now --target, as in --target 'ttft.p90<=500ms'"),
    ("sim audit", ["--least-exact", "1"], "--least-exact is now --min-exact-share"),
    ("sim validate", ["--aa", "t"], "--aa is now --repeat"),
    ("sim serve", ["--kv-blocks", "9"], "--kv-blocks is now --num-gpu-blocks"),
    ("sim serve", ["--per-decode-ms", "1"], "--per-decode-ms: a model.json gives it; expected --latency-model MODEL"),
    ("sim serve", ["--drain-s", "1"], "--drain-s is now --drain"),
    ("report compare", ["a=t", "-o", "page.html"], "-o is now --html"),
    ("report compare", ["a=t", "--aa", "b"], "--aa is now --repeat"),
    (
        "report compare",
        ["a=t", "--images", "d"],
        "--images is now --html, whose figures have a button that saves them as SVG",
    ),
    (
        "report show",
        ["t", "--each-trace"],
        "--each-trace: gone; expected a trace at a time, or DuckDB over many as Parquet (docs/python.md)",
    ),
    ("tracefile synthesize", ["--times", "2"], "--times is now --scale"),
]


@pytest.mark.parametrize(("command", "argv", "said"), OLD, ids=[f"{command} {argv[-1]}" for command, argv, _ in OLD])
def test_an_old_name_is_refused_with_the_new_one(
    command: str, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(command, argv, capsys) == f"{command}: error: {said}"


def test_every_new_name_is_a_flag_of_a_command() -> None:
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


def test_help_imports_no_library_that_only_the_work_needs() -> None:
    helped = [*PROGRAMS, *COMMANDS]
    code = f"COMMANDS, HEAVY = {helped}, {ONLY_ON_USE}{HELPED}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == ""
