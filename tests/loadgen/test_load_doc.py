"""docs/load.md shows every pattern and dataset; loadgen takes its commands, and evalscope's examples."""

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
SHOWN = re.compile(r"(?:^|`)loadgen (?!build-dataset|sweep)(.*?)(?:$|`)", re.MULTILINE)
COMMANDS = SHOWN.findall(PAGE)
CHAT = "$T --api chat"
OF_EVALSCOPE = [
    f"{CHAT} --prompt-tokens 256:512 --output-tokens 256 --min-turns 2 --max-turns 5 --number 20 --parallel 10",
    f"{CHAT} --dataset sharegpt:zh.jsonl --output-tokens 512 --max-turns 3 --number 300 --parallel 10",
    f"{CHAT} --dataset messages:mine.jsonl --output-tokens 512 --max-turns 3 --number 100 --parallel 10",
    f"{CHAT} --dataset swe-smith:built.json --output-tokens 512 --dataset-offset 100 --number 200 --parallel 20",
    f"{CHAT} --dataset swe-smith:raw.jsonl --output-tokens 512 --first-turn-length 8192 --subsequent-turn-length 1024"
    """ --min-turns 3 --max-turns 8 --seed 42 --number 10 --parallel 5 --extra-body '{"ignore_eos": true}'""",
    f"{CHAT} --dataset trie:work.jsonl --parallel 4 --number 10 --duration 600 --extra-body '{{\"ignore_eos\": true}}'",
]
"""The examples of evalscope's page on multi-turn loads, with the flags of docs/evalscope.md."""


def test_every_pattern_and_dataset_has_its_row() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)`", PAGE, re.MULTILINE))
    assert rows >= {*get_args(Pattern), *DATASETS, RANDOM}
    assert len(COMMANDS) > 20


def test_the_sweep_is_a_plan_of_eight_runs() -> None:
    shown = re.findall(r"^loadgen sweep (.*?[^\\])$", PAGE, re.MULTILINE | re.DOTALL)
    (plan,) = [parse_sweep(shlex.split(each.replace("\\\n", " "))) for each in shown]
    assert [run.name for run in plan.runs] == [
        *("bf16-p8-r1", "fp8-p8-r1", "fp8-p16-r1", "bf16-p16-r1"),
        *("bf16-p24-r1", "fp8-p24-r1", "fp8-p32-r1", "bf16-p32-r1"),
    ]


@pytest.mark.parametrize("command", [*COMMANDS, *OF_EVALSCOPE])
def test_every_command_is_taken(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day.csv").write_text("t_s,rate\n0,2\n60,0\n")
    for name in re.findall(r"--dataset [\w-]+:(\S+)", command):
        (tmp_path / name).touch()
    parse_config(shlex.split(command.replace("$T", "--url http://localhost:8000 -o out.jsonl")))
