"""The designed load of ``--pattern calibration``: which stages, how they follow one another, what it refuses."""

import shlex
from bisect import bisect
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.core.job import UNSHARDED, add_shares
from loadgen.core.lengths import LengthDistribution
from loadgen.core.request import PlannedRequest
from loadgen.loadflags import parse_config
from loadgen.plan.config import LoadConfig
from loadgen.plan.loadjob import PAUSE_MS, LoadJob, OpenLoad
from loadgen.plan.stages import outlines, waves
from loadgen.plan.workload import Workload
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta, Record, RequestId

SMALL = LoadConfig(
    url="http://x",
    trace=Path("t"),
    pattern="calibration",
    prompt_tokens=LengthDistribution(50, 400),
    parallel=4,
    seed=1,
)


def flags(text: str = "") -> LoadConfig:
    return parse_config(["--url", "http://x", "-o", "t", "--pattern", "calibration", *shlex.split(text)])


def test_round_stages() -> None:
    """From 50 to 400 tokens are three doublings: four sizes alone. Four at once: by two and by four."""
    described = [
        (wave.stage, [[str(turn.prompt) for turn in session] for session in wave.sessions[:2]], len(wave.sessions))
        for wave in islice(outlines(SMALL), 16)
    ]
    new = {"50:71": "zipf:1,16,18", "71:141": "zipf:1,16,35", "141:283": "zipf:1,16,71", "283:400": "zipf:1,16,100"}
    alone = [
        ("alone", [["400" if prompt == "283:400" else f"zipf:1,{prompt.replace(':', ',')}", new[prompt]]], 1)
        for prompt in ("283:400", "71:141", "50:71", "141:283")  # in an order that the seed draws
    ]
    short, half, quarter = ["zipf:1,50,71"], ["zipf:1,141,283"], ["zipf:1,71,141"]
    rest = ["16"] * 3
    assert described[:15] == [
        *alone,
        ("short", [short, short], 2),
        ("short", [short, short], 4),
        ("long", [["zipf:1,283,400", new["283:400"]]] * 2, 2),  # both together twice the longest
        ("long", [[*half, new["141:283"]]] * 2, 4),
        ("shared", [quarter, quarter], 2),
        ("shared", [quarter, quarter], 4),
        ("rested", [[*short, *rest]], 1),
        ("rested", [[*quarter, *rest]], 1),
        ("rested", [["400", *rest]], 1),
        ("beside", [short, short], 3),
        ("beside", [short, short], 3),
    ]
    # Warm turns by the three, which together are as much as the one of the other stages.
    assert described[15] == ("mix", [["zipf:1,50,400"], ["zipf:1,50,400", *["zipf:1,16,33"] * 3]], 16)
    interrupting = [wave.sessions[-1] for wave in islice(outlines(SMALL), 13, 15)]
    # Two tokens are answered, then a long prompt comes beside the others' answers.
    assert [[(str(turn.prompt), str(turn.output)) for turn in session] for session in interrupting] == [
        [("16", "2"), ("zipf:1,283,400", "2")],
        [("16", "2"), (quarter[0], "2")],
    ]


def test_draws_stay_in_range_and_differ_by_seed() -> None:
    config = flags("--prompt-tokens 64:8000 --output-tokens 8:20 --seed 3")
    sessions = list(Workload(config))
    assert [session.index for session in sessions] == list(range(len(sessions)))
    turns = [turn for session in sessions for turn in session.turns]
    assert all(16 <= turn.prompt_tokens <= 8000 for turn in turns)
    assert {turn.output_tokens for turn in turns} == {2, *range(8, 21)}
    pauses_ms = sorted(turn.think_ms for turn in turns if turn.think_ms)
    assert {bisect([20, 120, 300, 500, 1000, 2500, 5000], pause_ms) for pause_ms in pauses_ms} == {1, 2, 4, 6}
    shared = [[session.turns[0] for session in wave.sessions] for wave in waves(config) if wave.stage == "shared"]
    assert all(len({(turn.prompt_key, turn.prompt_tokens) for turn in wave}) == 1 for wave in shared)
    again = sum(len(wave) - 1 for wave in shared)
    assert len({turn.prompt_key for turn in turns}) == len(turns) - again  # nothing else is shared by sessions
    other = list(Workload(replace(config, seed=4)))
    assert len(other) == len(sessions)
    assert not {turn.prompt_key for turn in turns} & {turn.prompt_key for session in other for turn in session.turns}
    assert [session.turns[0].prompt_tokens for session in other] != [s.turns[0].prompt_tokens for s in sessions]


def sized(folder: Path, flags_beside: str = "", **engine: Any) -> tuple[str, int | None]:
    """The calibration's size for three requests of 40, 9,000 and 3,000 tokens, of which two are in flight at once."""
    times = ((0.0, 40, 50.0), (100.0, 9_000, 80.0), (150.0, 3_000, 90.0))
    with TraceWriter(folder / "t.jsonl", Meta(block_size=32, engine=Engine(**engine)), overwrite=True) as writer:
        for number, (arrival_ms, prompt, e2e_ms) in enumerate(times):
            name = RequestId(f"r{number}")
            writer.write(Record(request_id=name, arrival_ms=arrival_ms, prompt_tokens=prompt, e2e_ms=e2e_ms))
    config = flags(f"--for {folder / 't.jsonl'} {flags_beside}")
    return str(config.prompt_tokens), config.parallel


def test_calibration_load_is_sized_for_a_trace(tmp_path: Path) -> None:
    """Up to the longest prompt, and not under the usual concurrency; within what the trace's engine can hold."""
    assert sized(tmp_path) == ("64:9000", 8)
    assert sized(tmp_path, "--prompt-tokens 64:512") == ("64:512", 8)
    assert sized(tmp_path, "--parallel 32") == ("64:9000", 32)
    # A conversation grows by a quarter and four outputs of 48: 5/4 of 6,400 and 192 are 8,192.
    assert sized(tmp_path, max_model_len=8_192) == ("64:6400", 8)
    assert sized(tmp_path, num_gpu_blocks=300, block_size=32, max_num_seqs=4) == ("64:3200", 4)


def test_digest_is_reproducible() -> None:
    digests = [add_shares([Workload(config).survey().digest_share]) for config in (SMALL, replace(SMALL, seed=2))]
    assert digests[0] == "cbe4d9ebb572257d551542191246ab461d65f3b8dee5dfe0ac8dab3c7f003d1d"
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--rate 2", "--rate: 2.0 with --pattern calibration"),
        ("--turns 3", "--turns: 3 with --pattern calibration"),
        ("--think 1s", "--think: 1 with --pattern calibration"),
        ("--prefix-count 2 --prefix-tokens 9", "--prefix-count: 2 with --pattern calibration"),
        (f"--dataset trace:{__file__}", "--dataset: .* with --pattern calibration"),
        ("--parallel 1", "--parallel: expected 2 or more"),
        ("--prompt-tokens 500", "--prompt-tokens: 500; expected LOW:HIGH"),
        ("--prompt-tokens 500:1000", "--prompt-tokens: 500:1000; expected LOW:HIGH .* HIGH at least 8 LOW"),
        ("--procs 2", "--ray, --procs: with --pattern calibration"),
    ],
)
def test_flags_that_change_the_calibration_load_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        flags(text)


def opened(config: LoadConfig) -> OpenLoad:
    return LoadJob(config=config, model="m", load_id="l", key=HashKey(bytes(32)), block_size=16).open(UNSHARDED)


Spells = dict[int, tuple[float, float]]


def spells(plan_runner: ModuleType, config: LoadConfig, failing: frozenset[int] = frozenset()) -> Spells:
    """When each session began and ended, on an engine that takes 5 ms and another one for each token."""
    load = opened(config)
    sessions = list(load.load.workload)
    names = {
        load.load.request_id(session.index, turn): session.index
        for session in sessions
        for turn in range(len(session.turns))
    }

    def outcome(request: PlannedRequest) -> Any:
        took_ms = 5.0 + (request.prompt_tokens or 0) + request.max_tokens
        return plan_runner.Outcome(took_ms, "error" if names[request.request_id] in failing else "ok")

    played = plan_runner.play(load.plan(), outcome)
    result: Spells = {}
    for request_id, started_ms in played.started_ms.items():
        index, ended_ms = names[request_id], played.ended_ms[request_id]
        before = result.get(index, (started_ms, ended_ms))
        result[index] = min(before[0], started_ms), max(before[1], ended_ms)
    assert result.keys() == {session.index for session in sessions}
    return result


@pytest.mark.parametrize("failing", [frozenset(), frozenset({2, 5, 9, 30})])
def test_wave_starts_after_the_previous_wave(plan_runner: ModuleType, failing: frozenset[int]) -> None:
    """Also where sessions fail: one that does is over."""
    config = replace(SMALL, number=100)
    times, over_ms = spells(plan_runner, config, failing), 0.0
    for wave in waves(config):
        began_ms = [times[session.index][0] for session in wave.sessions]
        if wave.stage in ("alone", "rested"):
            assert began_ms == pytest.approx([over_ms + PAUSE_MS])
        else:
            assert over_ms + PAUSE_MS < began_ms[0]
            assert began_ms == sorted(set(began_ms))
        if wave.stage in ("short", "long"):
            assert began_ms[-1] < min(times[session.index][1] for session in wave.sessions)
        over_ms = max(times[session.index][1] for session in wave.sessions)


def test_dataset_is_sent_and_recorded_with_sessions(engine: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    text = "--pattern calibration --prompt-tokens 16:128 --output-tokens 2:4 --parallel 2 --number 10"
    assert main(["--url", engine.url, "-o", str(trace), *shlex.split(text)]) == 0
    meta, records = load_trace(trace)
    assert meta.workload is not None
    assert meta.workload.pattern == "calibration"
    assert meta.workload.extra["prompt_tokens"] == "16:128"
    # Four sizes, each extended; two, two that are extended, and two of one prompt, at once.
    assert len(records) == 4 * 2 + 2 + 2 * 2 + 2
    assert [record.turn for record in records].count(2) == 4 + 2
    session, other = records[-2:]
    assert session.block_hashes == other.block_hashes
    by_id = {record.request_id: record for record in records}
    for record in records:
        if record.turn == 2:
            assert by_id[record.parent_id or record.request_id].session_id == record.session_id
    assert {record.think_ms for record in records if record.turn != 2} == {None}
    assert [record.concurrency for record in sorted(records, key=lambda record: record.arrival_ms or 0)][:8] == [1] * 8
