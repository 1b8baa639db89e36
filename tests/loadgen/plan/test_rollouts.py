"""Groups of sessions from one first prompt: their starts, what they share, and the draws of each on its own."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.__main__ import main
from loadgen.core.draws import Stream, below, draw
from loadgen.core.job import Shard, add_shares
from loadgen.core.lengths import LengthDistribution
from loadgen.loadflags import parse_config
from loadgen.plan.config import LoadConfig
from loadgen.plan.workload import Workload
from loadgen.text.messages import Piece, SyntheticMessage
from tracefile import BlockHasher, InputError, load_key, load_trace

GROUPS = LoadConfig(
    url="http://x",
    trace=Path("t"),
    pattern="rollouts",
    rate=1.0,
    number=2,
    seed=1,
    group_size=3,
    group_gap_s=LengthDistribution(2, 2),
    turns=LengthDistribution(2, 2),
    prompt_tokens=LengthDistribution(10, 90),
    output_tokens=LengthDistribution(4, 99),
)
FLAGS = ("--url", "http://x", "-o", "t", "--rate", "1", "--number", "2")


def digest(config: LoadConfig, shards: int) -> str:
    return add_shares([Workload(config, Shard(index, shards)).survey().digest_share for index in range(shards)])


def test_the_starts_of_two_groups() -> None:
    """Groups arrive at 1 a second, evenly; each starts a session every two seconds."""
    sessions = list(Workload(replace(GROUPS, pattern="constant")))
    group_of = {session.turns[0].prompt_key: number for number, session in enumerate(sessions[:2])}
    assert [(session.due_ms, group_of[session.turns[0].prompt_key]) for session in sessions] == [
        (0.0, 0),
        (1000.0, 1),
        (2000.0, 0),
        (3000.0, 1),
        (4000.0, 0),
        (5000.0, 1),
    ]
    assert [session.index for session in sessions] == list(range(6))
    first, other, second = sessions[:3]
    # One task: the first prompt is shared, the rest is each session's own.
    assert first.turns[0].prompt_tokens == second.turns[0].prompt_tokens != other.turns[0].prompt_tokens
    assert first.turns[1].prompt_key != second.turns[1].prompt_key
    assert len({turn.output_tokens for session in sessions for turn in session.turns}) > 8


def test_groups_together_without_a_gap_and_in_a_closed_loop() -> None:
    together = replace(GROUPS, group_gap_s=None)
    burst = list(Workload(replace(together, pattern="burst", rate=None, burst_size=1, burst_every_s=10.0)))
    assert [session.due_ms for session in burst] == [0.0] * 3 + [10_000.0] * 3
    closed = list(Workload(replace(together, rate=None, parallel=4)))
    assert [session.due_ms for session in closed] == [None] * 6
    assert [session.turns for session in closed] == [session.turns for session in burst]


def test_no_session_of_a_group_begins_after_the_end() -> None:
    timed = replace(GROUPS, pattern="constant", number=None, duration_s=2.5)
    assert [session.due_ms for session in Workload(timed)] == [0.0, 1000.0, 2000.0, 2000.0]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 5),
    number=st.integers(1, 30),
    gap=st.sampled_from([None, LengthDistribution(0, 3), LengthDistribution(0, 0), LengthDistribution(5, 5)]),
    seconds=st.sampled_from([None, 3.0, 20.0]),
    shards=st.integers(1, 4),
    offset=st.integers(0, 3),
)
def test_sessions_are_what_a_slow_planner_makes(
    *, size: int, number: int, gap: LengthDistribution | None, seconds: float | None, shards: int, offset: int
) -> None:
    gap = gap if size > 1 else None
    config = replace(GROUPS, group_size=size, group_gap_s=gap, number=number, duration_s=seconds, dataset_offset=offset)
    planned = [describe(session) for session in Workload(config)]
    assert planned == list(slowly(config))
    parts = [list(Workload(config, Shard(index, shards))) for index in range(shards)]
    assert sorted(describe(session) for part in parts for session in part) == sorted(planned)
    keys = [{session.turns[0].prompt_key for session in part} for part in parts]
    assert sum(map(len, keys)) == len(set().union(*keys))  # no group is in two shards
    assert digest(config, shards) == digest(config, 1)


def describe(session: Any) -> tuple[float, list[tuple[int, int, int]]]:
    return session.due_ms, [(turn.prompt_tokens, turn.prompt_key, turn.output_tokens) for turn in session.turns]


def slowly(config: LoadConfig) -> Iterator[tuple[float, list[tuple[int, int, int]]]]:
    """Sessions one at a time: every group's starts, sorted, and each draw by itself."""
    alone = replace(config, group_size=1, group_gap_s=None, turns=LengthDistribution(1, 1), dataset_offset=0)
    starts = []
    for group, first in enumerate(Workload(alone)):
        due_us = round((first.due_ms or 0.0) * 1000)
        for place in range(config.group_size):
            number = (group + config.dataset_offset) * config.group_size + place
            if place and config.group_gap_s is not None:
                low, high = (round(end * 1e6) for end in (config.group_gap_s.low, config.group_gap_s.high))
                due_us += low + below(draw(config.seed, Stream.GROUP_GAP, number), high - low + 1)
            starts.append((due_us, number))
    for due_us, number in sorted(starts):
        if config.ends_s is not None and due_us >= config.ends_s * 1e6:
            continue
        turns = []
        for turn in range(2):
            at = number if turn else number // config.group_size
            key = draw(config.seed, Stream.PROMPT_TOKENS, at, turn)
            prompt = 10 + below(draw(config.seed, Stream.PROMPT_LENGTH, at, turn), 81)
            output = 4 + below(draw(config.seed, Stream.OUTPUT_LENGTH, number, turn), 96)
            turns.append((prompt, key, output))
        yield due_us / 1000, turns


@pytest.mark.parametrize("gap", [None, LengthDistribution(0, 4)])
def test_a_dataset_is_a_group_an_entry(tmp_path: Path, gap: LengthDistribution | None) -> None:
    rows = [
        {
            "input_prompt_length": 100 + row,
            "num_turns": 1,
            "assistant_response_length": [5],
            "tool_call_output_length": [20],
            "tool_call_latency": [0.5],
            "final_assistant_response_length": 6,
        }
        for row in range(4)
    ]
    (tmp_path / "trie").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    config = replace(
        GROUPS,
        turns=LengthDistribution(1, 1),
        output_tokens=None,
        number=None,
        group_gap_s=gap,
        dataset="trie",
        dataset_path=tmp_path / "trie",
    )
    sessions = list(Workload(config))
    # Once through the file, to the last session of each group.
    lengths = sorted(session.turns[0].prompt_tokens for session in sessions)
    assert lengths == [length for length in range(100, 104) for _ in range(3)]
    assert len({session.turns[0].prompt_key for session in sessions}) == 4
    assert len({session.turns[1].prompt_key for session in sessions}) == 12
    assert digest(config, 3) == digest(config, 1)
    twice = list(islice(Workload(replace(config, number=5)), 15))
    assert sorted({session.turns[0].prompt_tokens for session in twice}) == [100, 101, 102, 103]


def test_a_groups_sessions_share_their_first_prompts_blocks_and_no_more(engine: Any, tmp_path: Path) -> None:
    flags = ("--pattern", "rollouts", "--group-size", "3", "--rate", "20", "--number", "2", "--turns", "2")
    lengths = ("--prompt-tokens", "50", "--output-tokens", "30")
    assert main(["--url", engine.url, "-o", str(tmp_path / "t"), *flags, *lengths, "--procs", "2"]) == 0
    meta, records = load_trace(tmp_path / "t")
    assert meta.workload is not None
    assert (meta.workload.extra["group_size"], meta.workload.extra["temperature"]) == (3, 1.0)
    assert {body["temperature"] for body in engine.seen} == {1.0}
    hasher = BlockHasher(load_key(), model="scripted")
    prompts = {tuple(body["prompt"]) for body in engine.seen if len(body["prompt"]) == 50}
    assert len(prompts) == 2
    first = [record for record in records if record.turn == 1]
    assert len(first) == len({record.session_id for record in first}) == 6
    shared = sorted(tuple(record.block_hashes or ()) for record in first)
    assert shared == sorted(tuple(hasher.hash_blocks(prompt)) for prompt in prompts for _ in range(3))
    # Later turns go on from outputs of their own.
    later = [record for record in records if record.turn == 2]
    assert len({tuple(record.block_hashes or ()) for record in later}) == 6
    assert {tuple(record.block_hashes or ())[:3] for record in later} == set(shared)
    assert all((record.cached_tokens or 0) >= 64 for record in later)


def test_a_tools_latency_is_the_pause_before_its_output(tmp_path: Path) -> None:
    random = parse_config([*FLAGS, "--turns", "3", "--tool-latency", "1s:2s", "--tool-role", "tool", "--api", "chat"])
    for session in Workload(random):
        first, *later = session.turns
        assert (first.think_ms, first.said) == (0.0, ())
        for turn in later:
            assert 1000 <= turn.think_ms <= 2000
            assert turn.said == (SyntheticMessage("tool", (Piece(turn.prompt_key, turn.prompt_tokens),)),)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    path = tmp_path / "m"
    path.write_bytes(msgspec.json.encode(messages))
    flags = ["--dataset", f"messages:{path}", "--api", "chat", "--think", "5s", "--tool-latency", "300ms"]
    (session,) = Workload(parse_config(["--url", "http://x", "-o", "t", "--rate", "1", *flags]))
    assert [turn.think_ms for turn in session.turns] == [0.0, 300.0, 5000.0]


def test_a_workloads_own_latencies_give_way_to_the_flags(tmp_path: Path) -> None:
    row = {
        "input_prompt_length": 9,
        "num_turns": 1,
        "assistant_response_length": [5],
        "tool_call_output_length": [20],
        "tool_call_latency": [0.25],
        "final_assistant_response_length": 6,
    }
    path = tmp_path / "trie"
    path.write_bytes(msgspec.json.encode(row))

    def pauses(*flags: str) -> list[float]:
        (session,) = Workload(parse_config([*FLAGS[:6], *flags, "--dataset", f"trie:{path}"]))
        return [turn.think_ms for turn in session.turns]

    assert pauses() == [0.0, 250.0]
    assert pauses("--think", "1s") == [0.0, 1000.0]
    assert pauses("--think", "1s", "--tool-latency", "2s") == [0.0, 2000.0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--group-size", "0"], "--group-size: 0; expected 1 to 16384"),
        (["--group-gap", "1s"], "--group-gap: expected it with --group-size"),
        (["--pattern", "rollouts", "--group-gap", "2"], "--group-gap: '2': 2 has no unit"),
        (["--tool-latency", "1s"], "--tool-latency: expected it with --turns of 2 or more"),
        (["--tool-latency", "1s", "--turns", "2", "--think", "1s"], "--tool-latency: expected it .* without --think"),
    ],
)
def test_flags_that_make_no_sense_are_named(flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_config([*FLAGS, *flags])


def test_a_group_is_sampled_unless_told_otherwise() -> None:
    assert parse_config([*FLAGS, "--pattern", "rollouts"]).group_size == 8
    assert parse_config([*FLAGS, "--pattern", "rollouts"]).fields.temperature == 1.0
    assert parse_config([*FLAGS, "--group-size", "4", "--temperature", "0.6"]).fields.temperature == 0.6
    assert parse_config([*FLAGS, "--group-size", "4", "--extra-body", '{"temperature": 0}']).fields.temperature is None
    assert parse_config([*FLAGS]).fields.temperature is None
