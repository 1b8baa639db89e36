"""What each mode of a replay keeps and what it changes: times, order, sharing, sessions, shards."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadgen.core.job import Shard, add_shares
from replay.survey import Selection, survey_trace
from tracefile.records.schema import BlockHash


def hashes(*values: int) -> list[BlockHash]:
    return [BlockHash(value) for value in values]


@pytest.fixture
def family(tmp_path: Path, traces: ModuleType) -> Path:
    """A root with two branches, of which one goes on from the block that the root generated; and one by itself."""
    root = {"prompt_tokens": 8, "output_tokens": 5, "output_block_hashes": hashes(3)}
    return Path(
        traces.written(
            tmp_path / "family.jsonl",
            [
                traces.request("root", session_id="s", turn=1, **root),
                traces.request("alone", arrival_ms=10.0, block_hashes=hashes(1, 8)),
                traces.request(
                    *("left",),
                    session_id="s",
                    parent_id="root",
                    arrival_ms=15.0,
                    prompt_tokens=13,
                    block_hashes=hashes(1, 2, 3),
                ),
                traces.request("right", session_id="s", parent_id="root", arrival_ms=25.0, e2e_ms=50.0),
                traces.request("last", session_id="s", parent_id="right", arrival_ms=80.0),
            ],
        )
    )


def test_open_loop_preserves_times(family: Path, traces: ModuleType, runner: ModuleType) -> None:
    played = runner.play(traces.opened(family).plan(), lambda request: runner.Outcome(took_ms=500.0))
    assert played.started_ms == {"root": 0.0, "alone": 10.0, "left": 15.0, "right": 25.0, "last": 80.0}
    played = runner.play(traces.opened(family, speedup=2.0).plan())
    assert played.started_ms == {"root": 0.0, "alone": 5.0, "left": 7.5, "right": 12.5, "last": 40.0}


def test_sessions_preserve_think_times_and_branches(family: Path, traces: ModuleType, runner: ModuleType) -> None:
    plan = traces.opened(family, replay_sessions=True).plan()
    played = runner.play(plan, lambda request: runner.Outcome(took_ms=100.0))
    # Both branches leave the root's end at their own pauses of 10 and 20 ms, the last one 5 ms after the right one's.
    assert played.started_ms == {"root": 0.0, "alone": 10.0, "left": 110.0, "right": 120.0, "last": 225.0}


def test_closed_loop_keeps_order_and_width(family: Path, traces: ModuleType, runner: ModuleType) -> None:
    plan = traces.opened(family, closed_loop=True, parallel=2).plan()
    outcome = lambda request: runner.Outcome(took_ms=100.0 if request.request_id == "root" else 10.0)  # noqa: E731
    played = runner.play(plan, outcome, parallel=2)
    assert played.ids == ["root", "alone", "left", "right", "last"]
    assert played.started_ms == {"root": 0.0, "alone": 0.0, "left": 10.0, "right": 20.0, "last": 30.0}
    assert played.most_in_flight == 2


def test_time_window_uses_the_traces_clock(family: Path, traces: ModuleType, runner: ModuleType) -> None:
    job = traces.opened(family, start_s=0.015, end_s=0.080, replay_sessions=True)
    played = runner.play(job.plan())
    # Their parent is not sent, so both are roots, at their recorded distance.
    assert played.started_ms == {"left": 0.0, "right": 10.0}
    survey = survey_trace(family, Selection(0.015, 0.080))
    assert survey.left_out == {"before --start": 2, "after --end": 1}


def test_hashes_without_output_substitution(family: Path, traces: ModuleType, runner: ModuleType) -> None:
    played = runner.play(traces.opened(family, replay_sessions=True, output_substitution=False).plan())
    records = {record.request_id: record for record in played.records}
    # What the root generated is not what the left one carries in its place, so it has a hash of its own.
    assert records["left"].block_hashes == [1, 2, 3]
    assert records["root"].output_block_hashes not in ([3], None)
    with_substitution = runner.play(traces.opened(family, replay_sessions=True).plan())
    assert next(each for each in with_substitution.records if each.request_id == "root").output_block_hashes == [3]


def test_request_fields_are_replayed(tmp_path: Path, traces: ModuleType, runner: ModuleType) -> None:
    source = traces.written(
        tmp_path / "t",
        [
            traces.request("whole", stream=False),
            traces.request("many", n=3, output_tokens=7),
            traces.request("first", priority=-2, max_tokens=50),
            traces.request("scored", prompt_logprobs=True),
            traces.request("adapted", lora="law", model="law"),
        ],
    )
    played = runner.play(traces.opened(source, loras={"law": "law-v2"}).plan())
    bodies = {request.request_id: runner.body(request) for request in played.sent}
    assert bodies["whole"]["stream"] is False
    assert "stream_options" not in bodies["whole"]
    # Seven tokens of three answers are three of each, the last not whole.
    assert (bodies["many"]["n"], bodies["many"]["max_tokens"], bodies["many"]["min_tokens"]) == (3, 3, 3)
    assert (bodies["first"]["priority"], bodies["first"]["max_tokens"]) == (-2, 2)
    # vLLM takes no more than 0 beside a stream, and that is enough: it looks the prompt up in no cache.
    assert [body.get("prompt_logprobs") for body in bodies.values()] == [None, None, None, 0, None]
    assert [record.request_id for record in played.records if record.prompt_logprobs] == ["scored"]
    assert [body["model"] for body in bodies.values()] == ["m", "m", "m", "m", "law-v2"]
    assert next(record for record in played.records if record.request_id == "adapted").lora == "law"


@st.composite
def forests(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests with parents, sessions and shared blocks, some of them generated."""
    made: list[dict[str, Any]] = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *range(index)]))
        made.append(
            {
                "name": f"r{index}",
                "arrival_ms": index * 10.0,
                "parent_id": None if parent is None else f"r{parent}",
                "session_id": draw(st.sampled_from([None, "s", "t"])),
                "prompt_tokens": 9,
                "block_hashes": hashes(draw(st.integers(1, 3)), draw(st.integers(10, 14))),
                "output_tokens": 5,
                "output_block_hashes": hashes(draw(st.integers(12, 16))),
            }
        )
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(forest=forests(), cut=st.tuples(st.integers(2, 4), st.booleans()))
def test_shards_add_up(
    tmp_path: Path, traces: ModuleType, runner: ModuleType, forest: list[dict[str, Any]], cut: tuple[int, bool]
) -> None:
    shards, sessions = cut
    records = [traces.request(fields["name"], **{k: v for k, v in fields.items() if k != "name"}) for fields in forest]
    source = tmp_path / "forest.jsonl"
    source.unlink(missing_ok=True)
    traces.written(source, records)
    unsharded = traces.opened(source, replay_sessions=sessions)
    parts = [traces.opened(source, Shard(index, shards), replay_sessions=sessions) for index in range(shards)]
    assert add_shares([part.digest_share() for part in parts]) == add_shares([unsharded.digest_share()])
    assert sum(part.planned() for part in parts) == unsharded.planned()
    # Real answers included: the generated ids are the request's own, so every process must see the same ones.
    at_once = runner.play(unsharded.plan(), generated=ids_of)
    one_by_one = [runner.play(part.plan(), generated=ids_of) for part in parts]
    bodies = {request.request_id: request.body for played in one_by_one for request in played.sent}
    assert bodies == {request.request_id: request.body for request in at_once.sent}
    described = {record.request_id: record for played in one_by_one for record in played.records}
    assert described == {record.request_id: record for record in at_once.records}


def ids_of(request: Any) -> list[int]:
    return [2000 + int(request.request_id[1:]) * 100 + position for position in range(request.max_tokens)]


def test_digest_differs_between_loads(family: Path, traces: ModuleType) -> None:
    flags: list[dict[str, Any]] = [
        {},
        {"speedup": 2.0},
        {"cold_prompts": True},
        {"replay_sessions": True},
        {"end_s": 0.02},
        {"output_substitution": False},
        {"closed_loop": True, "parallel": 2},
    ]
    shares = [traces.opened(family, **each).digest_share() for each in flags]
    assert len(set(shares)) == len(flags)
    # The same tokens, whatever fields an engine wants with them.
    assert traces.opened(family).digest_share() == traces.opened(family, dialect="sglang").digest_share()
