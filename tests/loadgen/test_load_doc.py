"""docs/load.md shows every pattern and dataset; loadgen takes its commands."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from loadgen.datasets import DATASETS, RANDOM
from loadgen.loadflags import parse_config
from loadgen.plan.config import Pattern
from loadgen.sweepplan import parse_sweep

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "load.md").read_text()
SHOWN = re.compile(r"(?:^|`)loadgen (?!sweep)(.*?)(?:$|`)", re.MULTILINE)
COMMANDS = SHOWN.findall(PAGE)


def test_all_patterns_and_datasets_have_a_row() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)`", PAGE, re.MULTILINE))
    assert rows >= {*get_args(Pattern), *DATASETS, RANDOM}
    assert len(COMMANDS) > 15


def test_documented_sweep_has_eight_runs() -> None:
    shown = re.findall(r"^loadgen sweep (.*?[^\\])$", PAGE, re.MULTILINE | re.DOTALL)
    (plan,) = [parse_sweep(shlex.split(each.replace("\\\n", " "))) for each in shown]
    assert [run.name for run in plan.runs] == [
        *("bf16-p8-r1", "fp8-p8-r1", "fp8-p16-r1", "bf16-p16-r1"),
        *("bf16-p24-r1", "fp8-p24-r1", "fp8-p32-r1", "bf16-p32-r1"),
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_all_commands_are_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day.csv").write_text("t_s,rate\n0,2\n60,0\n")
    for name in re.findall(r"--dataset [\w-]+:(\S+)", command):
        (tmp_path / name).touch()
    parse_config(shlex.split(command.replace("$T", "--url http://localhost:8000 -o out.jsonl")))
