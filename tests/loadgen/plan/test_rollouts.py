"""Groups of sessions from one first prompt: their starts, what they share, and the draws of each on its own."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.__main__ import main
from loadgen.core.draws import Stream, below, draw
from loadgen.core.job import Shard, add_shares
from loadgen.core.lengths import LengthDistribution
from loadgen.plan.config import LoadConfig
from loadgen.plan.workload import Workload
from tracefile.files.reading import load_trace
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import load_key

GROUPS = LoadConfig(
    url="http://x",
    trace=Path("t"),
    pattern="rollouts",
    rate=1.0,
    number=2,
    seed=1,
    group_size=3,
    turns=LengthDistribution(2, 2),
    prompt_tokens=LengthDistribution(10, 90),
    output_tokens=LengthDistribution(4, 99),
)


def digest(config: LoadConfig, shards: int) -> str:
    return add_shares([Workload(config, Shard(index, shards)).survey().digest_share for index in range(shards)])


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 5),
    number=st.integers(1, 30),
    seconds=st.sampled_from([None, 3.0, 20.0]),
    shards=st.integers(1, 4),
)
def test_sessions_equal_a_slow_planner(*, size: int, number: int, seconds: float | None, shards: int) -> None:
    config = replace(GROUPS, group_size=size, number=number, duration_s=seconds)
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
    """Sessions one at a time: every group's start, and each draw by itself."""
    for group, first in enumerate(Workload(replace(config, group_size=1, turns=LengthDistribution(1, 1)))):
        for number in range(group * config.group_size, (group + 1) * config.group_size):
            turns = []
            for turn in range(2):
                at = number if turn else group
                key = draw(config.seed, Stream.PROMPT_TOKENS, at, turn)
                prompt = 10 + below(draw(config.seed, Stream.PROMPT_LENGTH, at, turn), 81)
                output = 4 + below(draw(config.seed, Stream.OUTPUT_LENGTH, number, turn), 96)
                turns.append((prompt, key, output))
            yield first.due_ms or 0.0, turns


def test_dataset_entry_is_a_group(tmp_path: Path) -> None:
    header, lines = {"meta": {"schema": "kvtape/1"}}, []
    for row in range(4):
        first = {"request_id": f"{row}.0", "arrival_ms": row, "prompt_tokens": 100 + row, "output_tokens": 5}
        then = {"request_id": f"{row}.1", "parent_id": f"{row}.0", "prompt_tokens": 125 + row, "output_tokens": 6}
        lines += [first, then | {"arrival_ms": row, "think_ms": 500.0}]
    (tmp_path / "t").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in [header, *lines]))
    config = replace(
        GROUPS,
        turns=None,
        output_tokens=None,
        number=None,
        dataset="trace",
        dataset_path=tmp_path / "t",
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


def test_group_sessions_share_their_first_prompt_only(engine: Any, tmp_path: Path) -> None:
    flags = ("--pattern", "rollouts", "--group-size", "3", "--rate", "20", "--number", "2", "--turns", "2")
    lengths = ("--prompt-tokens", "50", "--output-tokens", "30")
    assert main(["--url", engine.url, "-o", str(tmp_path / "t"), *flags, *lengths, "--procs", "2"]) == 0
    meta, records = load_trace(tmp_path / "t")
    assert meta.workload is not None
    assert (meta.workload.extra["group_size"], meta.workload.extra["extra_body"]) == (3, {"temperature": 1.0})
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
