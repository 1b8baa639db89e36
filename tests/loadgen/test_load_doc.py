"""docs/load.md shows every pattern and dataset, and every command in it is one that loadgen takes."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from loadgen.__main__ import parse_config
from loadgen.datasets import DATASETS, RANDOM
from loadgen.plan.config import Pattern

PAGE = (Path(__file__).parents[2] / "docs" / "load.md").read_text()
COMMANDS = re.findall(r"(?:^|`)loadgen (?!build-dataset)(.*?)(?:$|`)", PAGE, re.MULTILINE)


def test_every_pattern_and_dataset_has_its_row() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)`", PAGE, re.MULTILINE))
    assert rows >= {*get_args(Pattern), *DATASETS, RANDOM}
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_taken(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day.csv").write_text("t_s,rate\n0,2\n60,0\n")
    for name in re.findall(r"--dataset [\w-]+:(\S+)", command):
        (tmp_path / name).touch()
    parse_config(shlex.split(command.replace("$T", "--url http://localhost:8000 -o out.jsonl")))
