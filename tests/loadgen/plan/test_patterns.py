"""Patterns, caps and datasets as a user runs them, against a scripted engine over a real socket."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.plan.arrivals import read_rate_series
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import Record


def load(engine: Any, trace: Path, flags: str) -> list[Record]:
    assert main(["--url", engine.url, "-o", str(trace), *shlex.split(flags)]) == 0
    return load_trace(trace)[1]


def scheduled(records: Sequence[Record]) -> list[float]:
    return sorted(record.scheduled_ms or 0.0 for record in records)


def test_rate_series_from_flag_or_file(engine: Any, tmp_path: Path) -> None:
    expected = ((0.0, 20.0), (0.2, 0.0), (0.3, 10.0), (0.5, 0.0))
    assert read_rate_series("0:20,0.2:0,0.3:10,0.5:0") == expected
    rows = [{"t_s": t_s, "rate": rate} for t_s, rate in expected]
    for name, text in {
        "a.csv": "t_s,rate\n0,20\n0.2,0\n0.3,10\n0.5,0\n",
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }.items():
        (tmp_path / name).write_text(text)
        assert read_rate_series(str(tmp_path / name)) == expected
    flags = f"--pattern series --rate-series {tmp_path / 'a.csv'} --output-tokens 2 --seed 5"
    due = scheduled(load(engine, tmp_path / "t", flags))
    assert due
    assert all(at < 200 or 300 <= at < 500 for at in due)
    with pytest.raises(InputError, match=r"none\.csv: No such file or directory; expected CSV or JSONL with columns"):
        read_rate_series(str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t_s,rate\n0,1\n0,2\n", ":3: t_s 0, rate 2; expected"),
        ("time,rate\n0,1\n", ":1: columns time, rate; expected t_s and rate"),
        ("t_s,rate\n0,3\n", "one point at 0"),
    ],
)
def test_a_bad_series_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s").write_text(text)
    flags = ["--url", "http://127.0.0.1:1", "-o", str(tmp_path / "t"), "--pattern", "series"]
    with pytest.raises(InputError, match=message):
        main([*flags, "--rate-series", str(tmp_path / "s")])


def test_after_the_duration_open_sessions_end(engine: Any, tmp_path: Path) -> None:
    engine.first_token_s = 0.05
    flags = "--parallel 2 --turns 3 --duration 0.12s --output-tokens 2"
    records = load(engine, tmp_path / "t", flags)
    # A session takes 150 ms: two begin, none after the time, and both have all their turns.
    assert [sorted(record.turn or 0 for record in records).count(turn) for turn in (1, 2, 3)] == [2, 2, 2]
