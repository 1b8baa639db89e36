"""Patterns, caps and datasets as a user runs them, against a scripted engine over a real socket."""

import json
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.plan.arrivals import read_rate_series
from tests.jsonoutput import json_of
from tracefile import InputError, Record, load_trace


def load(engine: Any, trace: Path, flags: str) -> list[Record]:
    assert main(["--url", engine.url, "-o", str(trace), *shlex.split(flags)]) == 0
    return load_trace(trace)[1]


def scheduled(records: Sequence[Record]) -> list[float]:
    return sorted(record.scheduled_ms or 0.0 for record in records)


def most_open(records: Sequence[Record]) -> int:
    """Sessions open at once: from a session's first send to its last end, pauses included."""
    by_session = sorted(records, key=lambda record: (record.session_id or "", record.turn or 0))
    steps: list[tuple[float, int]] = []
    for _, turns in groupby(by_session, key=lambda record: record.session_id):
        several = list(turns)
        steps += [(several[0].arrival_ms or 0.0, 1), (several[-1].end_ms() or 0.0, -1)]
    opened = 0
    return max(opened := opened + step for _, step in sorted(steps))


def test_a_staircase_is_sent_as_planned(engine: Any, tmp_path: Path) -> None:
    flags = "--pattern staircase --rate 10:30 --steps 3 --step-duration 0.2s --spacing constant --output-tokens 2"
    # 2, 4 and 6 arrivals, each step's evenly.
    expected = [0, 100, 200, 250, 300, 350, 400, 433.333, 466.667, 500, 533.333, 566.667]
    assert scheduled(load(engine, tmp_path / "t", flags)) == pytest.approx(expected, abs=0.01)


def test_bursts_are_due_at_once(engine: Any, tmp_path: Path) -> None:
    flags = "--pattern burst --burst-size 3 --burst-every 0.2s --number 7 --output-tokens 2"
    assert scheduled(load(engine, tmp_path / "t", flags)) == pytest.approx([0, 0, 0, 200, 200, 200, 400], abs=0.01)


def test_a_series_is_read_from_a_file(engine: Any, tmp_path: Path) -> None:
    for name, text in {
        "a.csv": "t_s,rate\n0,20\n0.2,0\n0.3,10\n0.5,0\n",
        "a.jsonl": "".join(
            json.dumps({"t_s": t_s, "rate": rate}) + "\n" for t_s, rate in [(0, 20), (0.2, 0), (0.3, 10), (0.5, 0)]
        ),
    }.items():
        (tmp_path / name).write_text(text)
        flags = f"--pattern series --rate-series {tmp_path / name} --spacing constant --output-tokens 2"
        records = load(engine, tmp_path / f"{name}.trace", flags)
        assert scheduled(records) == pytest.approx([0, 50, 100, 150, 300, 400], abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t_s,rate\n0,1\n0,2\n", ":3: t_s 0, rate 2; expected"),
        ("t_s,rate\n0,-1\n", ":2: t_s 0, rate -1"),
        ("t_s,rate\n0,x\n", ":2: .*rate"),
        ("time,rate\n0,1\n", ":1: columns time, rate; expected t_s and rate"),
        ('{"t_s": 1}\n', ":1: .*rate"),
        ("t_s,rate\n0,0\n5,0\n", "no rate above 0"),
        ("t_s,rate\n0,3\n", "one point at 0"),
    ],
)
def test_a_bad_series_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s").write_text(text)
    flags = ["--url", "http://127.0.0.1:1", "-o", str(tmp_path / "t"), "--pattern", "series"]
    with pytest.raises(InputError, match=message):
        main([*flags, "--rate-series", str(tmp_path / "s")])


def test_a_series_that_is_not_there_is_told_from_a_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv: No such file or directory; expected CSV or JSONL with columns"):
        read_rate_series(tmp_path / "none.csv")


def test_a_cap_on_sessions_holds_back_those_that_arrive(engine: Any, tmp_path: Path) -> None:
    engine.first_token_s = 0.03
    flags = "--pattern constant --rate 100 --number 12 --turns 2 --think 0.01s --parallel-sessions 2 --output-tokens 2"
    summary = json_of(main, ["--url", engine.url, "-o", str(tmp_path / "t"), *shlex.split(flags)])
    records = load_trace(tmp_path / "t")[1]
    assert len(records) == 24
    assert most_open(records) == 2
    firsts = [record for record in records if record.turn == 1]
    # Their latency counts from when they arrived, not from when there was room.
    assert scheduled(firsts) == pytest.approx([10.0 * index for index in range(12)], abs=0.01)
    assert {record.think_ms for record in firsts} == {None}
    assert summary["metrics"]["client"]["held"] >= 8


def test_both_caps_hold_in_a_closed_loop(engine: Any, tmp_path: Path) -> None:
    engine.first_token_s = 0.02
    flags = "--number 12 --turns 1:3 --think 0:0.03s --parallel-sessions 5 --parallel 2 --output-tokens 2 --seed 1"
    records = load(engine, tmp_path / "t", flags)
    assert max(record.concurrency or 0 for record in records) == 2
    assert most_open([record for record in records if record.session_id]) <= 5
    assert len({record.request_id for record in records}) == len(records)


def test_time_over_no_session_starts_but_those_begun_end(engine: Any, tmp_path: Path) -> None:
    engine.first_token_s = 0.05
    flags = "--parallel-sessions 2 --turns 3 --duration 0.12s --output-tokens 2"
    records = load(engine, tmp_path / "t", flags)
    # A session takes 150 ms: two begin, none after the time, and both have all their turns.
    assert [sorted(record.turn or 0 for record in records).count(turn) for turn in (1, 2, 3)] == [2, 2, 2]


def test_sessions_that_found_no_room_in_time_are_told_of(engine: Any, tmp_path: Path, capsys: Any) -> None:
    engine.first_token_s = 0.1
    flags = "--pattern constant --rate 50 --duration 0.15s --parallel-sessions 1 --output-tokens 2"
    records = load(engine, tmp_path / "t", flags)
    # Eight arrive; the second ends after the time is over.
    assert len(records) == 2
    assert "6 sessions arrived but were not started" in capsys.readouterr().out


def test_trie_is_sent_to_the_token(engine: Any, tmp_path: Path) -> None:
    row = {
        "input_prompt_length": 100,
        "num_turns": 2,
        "assistant_response_length": [7, 3],
        "tool_call_output_length": [50, 20],
        "tool_call_latency": [0.02, 0.01],
        "final_assistant_response_length": 5,
    }
    (tmp_path / "d").write_text(json.dumps(row) + "\n")
    records = load(engine, tmp_path / "t", f"--dataset trie:{tmp_path / 'd'} --parallel 1 --number 2")
    first, second = (
        [record for record in records if record.session_id == session]
        for session in sorted({record.session_id or "" for record in records})
    )
    for turns in (first, second):
        assert [(record.prompt_tokens, record.output_tokens) for record in turns] == [(100, 7), (157, 3), (180, 5)]
        assert [round((record.think_ms or 0) / 10) * 10 >= at for record, at in zip(turns, (0, 20, 10), strict=True)]
    prompts = [tuple(body["prompt"][:100]) for body in engine.seen]
    assert len(set(prompts)) == 2  # the row came round again with other tokens


def test_messages_are_sent_word_by_word_and_answered_by_the_model(engine: Any, tmp_path: Path) -> None:
    rows = [
        [
            {"role": "system", "content": "sys"},
            {"role": "user", "content": "eins"},
            {"role": "assistant", "content": "as the dataset has it"},
            {"role": "user", "content": "zwei"},
        ]
    ]
    (tmp_path / "d").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load(engine, tmp_path / "t", f"--dataset messages:{tmp_path / 'd'} --api chat --parallel 1")
    first, second = engine.seen
    assert first["messages"] == rows[0][:2]
    # 21 letters at four a token.
    assert first["max_tokens"] == 6
    assert second["messages"][:2] == rows[0][:2]
    assert second["messages"][2]["role"] == "assistant"
    assert second["messages"][2]["content"].startswith("t")  # the engine's own words
    assert second["messages"][3] == rows[0][3]
    assert second["max_tokens"] == 16


def test_a_dataset_of_several_processes_is_the_same_load(engine: Any, tmp_path: Path) -> None:
    rows = [[{"role": "user", "content": f"question {number}"}] for number in range(5)]
    (tmp_path / "d").write_text("".join(json.dumps(row) + "\n" for row in rows))
    digests, bodies = [], []
    for procs in (1, 2):
        engine.seen.clear()
        flags = f"--dataset messages:{tmp_path / 'd'} --api chat --rate 100 --number 8 --procs {procs}"
        load(engine, tmp_path / f"{procs}", flags)
        bodies.append(sorted(body["messages"][0]["content"] for body in engine.seen))
        workload = load_trace(tmp_path / f"{procs}")[0].workload
        assert workload is not None
        digests.append(workload.digest)
    assert bodies[0] == bodies[1] == sorted(f"question {number % 5}" for number in range(8))
    assert digests[0] == digests[1]


def test_a_dataset_that_is_not_there_is_named(tmp_path: Path) -> None:
    flags = shlex.split(f"-o {tmp_path / 't'} --dataset trie:{tmp_path / 'none'} --parallel 1 --number 1")
    with pytest.raises(InputError, match=r"--dataset: .*none: not there"):
        main(["--url", "http://127.0.0.1:1", *flags])
