"""Traces that make no sense: each is refused by file, line and field, or handled; no run is without an end."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loadgen.core.job import Shard
from loadgen.core.request import PlannedRequest
from replay.fidelity import Account, account_of, fidelity_of
from replay.survey import Survey, survey_trace
from tracefile.records.errors import InputError

META = {"meta": {"schema": "kvtape/1", "source": "tap", "block_size": 4}}
HUGE = 10**12


def line(name: str, **fields: Any) -> dict[str, Any]:
    """Nine prompt tokens, two of output, 5 ms long; fields of None are left out."""
    shape = {"arrival_ms": 0.0, "e2e_ms": 5.0, "prompt_tokens": 9, "output_tokens": 2, "block_hashes": [1, 2]}
    return {"request_id": name} | {key: value for key, value in (shape | fields).items() if value is not None}


def text(*lines: dict[str, Any] | str, meta: dict[str, Any] | None = None) -> str:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in (meta or META, *lines))


REFUSED = {
    "no lines": ("", ":1: no lines"),
    "only a header": (text(), "no request to send"),
    "negative prompt": (text(line("a", prompt_tokens=-1)), ":2: prompt_tokens: -1; expected >= 0"),
    "empty prompt": (text(line("a", prompt_tokens=0, block_hashes=[])), ":2: prompt_tokens: 0; expected 1 or more"),
    "NaN": (text('{"request_id": "a", "arrival_ms": NaN}'), ":2: NaN or Infinity"),
    "a prompt of a trillion": (text(line("a", prompt_tokens=HUGE)), f":2: prompt_tokens: {HUGE}; expected <= "),
    "blocks of a trillion": (
        text(line("a", prompt_tokens=None), meta={"meta": {"schema": "kvtape/1", "block_size": HUGE}}),
        ":1: meta.block_size: ",
    ),
    "hashes without a block size": (
        text(line("a"), meta={"meta": {"schema": "kvtape/1"}}),
        ":2: block_hashes: in a trace without meta.block_size",
    ),
    "hashes beyond the prompt": (text(line("a", prompt_tokens=7)), ":2: block_hashes: 2; expected at most"),
    "more true hashes than hashes": (text(line("a", hashable_blocks=3)), ":2: hashable_blocks: 3"),
    "a hash of words": (text(line("a", block_hashes=["x", 2])), ":2: block_hashes[0]: Expected `int`, got `str`"),
    "a negative hash": (text(line("a", block_hashes=[1, -2])), ":2: block_hashes: a hash outside 64 bits"),
    "the same id twice": (text(line("a"), line("b"), line("a")), ":4: request_id: duplicate of line 2"),
    "a cycle of three": (
        text(line("a", parent_id="c"), line("b", parent_id="a"), line("c", parent_id="b")),
        "parent_id: a cycle; expected parents before children",
    ),
    "an id that is no header": (text(line("a\r\nX-Evil: 1")), ":2: request_id: "),
    "broken in its middle": (text(line("a"), '{"request_id": "b"', line("c")), ":3: not JSON"),
    "nothing generates": (text(line("a", endpoint="/v1/embeddings")), "no request to send; 1 no generation"),
    "nothing is known": (text({"request_id": "a"}), "no request to send"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_traces_are_refused(tmp_path: Path, traces: ModuleType, name: str) -> None:
    content, message = REFUSED[name]
    source = tmp_path / "trace.jsonl"
    source.write_text(content)
    with pytest.raises(InputError) as error:
        survey_trace(source)
    assert message in str(error.value)
    assert str(error.value).startswith(str(source))
    assert "\n" not in str(error.value)


HANDLED: dict[str, tuple[str, list[tuple[str, float]]]] = {
    # Finish order is not arrival order: requests go out by arrival.
    "unsorted times": (text(line("late", arrival_ms=9.0), line("early", arrival_ms=3.0)), [("early", 0), ("late", 6)]),
    "no duration": (text(line("a", e2e_ms=0.0), line("b", e2e_ms=0.0)), [("a", 0), ("b", 0)]),
    "an unknown parent": (text(line("a", parent_id="gone", arrival_ms=7.0)), [("a", 0)]),
    # b came while a still ran, so it had not waited for it.
    "a parent that ends after its child began": (
        text(line("b", parent_id="a", arrival_ms=2.0), line("a")),
        [("a", 0), ("b", 2)],
    ),
    "a child before its parent": (
        text(line("b", parent_id="a", arrival_ms=1.0), line("a", arrival_ms=50.0)),
        [("b", 0), ("a", 49)],
    ),
    "an answer beyond its limit": (text(line("a", max_tokens=1)), [("a", 0)]),
    "an end that is not known": (
        text(line("a", e2e_ms=None), line("b", parent_id="a", arrival_ms=4.0)),
        [("a", 0), ("b", 4)],
    ),
    "a torn end": (text(line("a")) + '{"request_id": "b", "arr', [("a", 0)]),
}


@pytest.mark.parametrize("name", HANDLED)
def test_unusual_requests_are_sent(tmp_path: Path, traces: ModuleType, runner: ModuleType, name: str) -> None:
    content, sent = HANDLED[name]
    source = tmp_path / "trace.jsonl"
    source.write_text(content)
    played = runner.play(traces.opened(source, replay_sessions=True).plan())
    assert [(request_id, played.started_ms[request_id]) for request_id in played.ids] == sent


ODD_NUMBERS: st.SearchStrategy[Any] = st.sampled_from(
    [None, -1, 0, 1, 2, 7, 1.5, "x", [], {}, HUGE, 2**63, 2**64, -(2**70), 1e300, True]
)
FIELDS = st.sampled_from(
    [
        *("request_id", "parent_id", "session_id", "turn", "arrival_ms", "e2e_ms", "ttft_ms", "prompt_tokens"),
        *("output_tokens", "max_tokens", "n", "block_hashes", "output_block_hashes", "hashable_blocks"),
        *("itl_tokens", "itl_ms", "status", "http_status", "endpoint", "priority", "lora", "stream", "think_ms"),
        *("cached_tokens", "new"),
    ]
)
ODD_VALUES = st.one_of(
    ODD_NUMBERS,
    st.sampled_from(["a", "b", "c", "ok", "error", "timeout", "/v1/completions", "/v1/embeddings", "\n", "é"]),
    st.lists(st.one_of(st.integers(-2, 5), st.just(2**64), st.just("x")), max_size=4),
)
Mutation = tuple[int, str, Any]


@dataclass(frozen=True)
class Ordeal:
    """A trace with fields changed, and what its replay meets."""

    mutations: list[Mutation]
    sessions: bool
    failing: set[str]
    """Requests that the engine fails."""
    shards: int

    def write(self, source: Path) -> None:
        records = [
            line("a"),
            line("b", parent_id="a", arrival_ms=10.0, block_hashes=[1, 3], output_block_hashes=[]),
            line("c", parent_id="b", arrival_ms=20.0, prompt_tokens=14, block_hashes=[1, 3, 5]),
            line("d", arrival_ms=20.0, session_id="s"),
        ]
        for which, field, value in self.mutations:
            records[which][field] = value
        source.write_text(text(*records))


ORDEALS = st.builds(
    Ordeal,
    mutations=st.lists(st.tuples(st.integers(0, 3), FIELDS, ODD_VALUES), max_size=5),
    sessions=st.booleans(),
    failing=st.sets(st.sampled_from("abcd")),
    shards=st.integers(1, 3),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ordeal=ORDEALS)
@example(ordeal=Ordeal([(0, "status", "error"), (0, "output_tokens", None)], sessions=True, failing={"b"}, shards=2))
def test_random_records_are_refused_or_accounted_for(
    tmp_path: Path, traces: ModuleType, runner: ModuleType, ordeal: Ordeal
) -> None:
    source = tmp_path / "mutated.jsonl"
    ordeal.write(source)
    try:
        survey = survey_trace(source)
    except InputError as error:
        refused = str(error)
    else:
        account = accounted(survey, source, traces, runner, ordeal)
        account.check_integrity()
        assert account.requests == survey.total
        return
    assert refused.startswith(str(source))


def accounted(survey: Survey, source: Path, traces: ModuleType, runner: ModuleType, ordeal: Ordeal) -> Account:
    """The account of the replay in all its shards."""

    def outcome(request: PlannedRequest) -> Any:
        failed = request.request_id in ordeal.failing
        return runner.Outcome(status="error", error="http_503") if failed else runner.Outcome()

    sent, findings = 0, Counter[str]()
    for index in range(ordeal.shards):
        shard = Shard(index, ordeal.shards)
        job = traces.opened(source, shard, replay_sessions=ordeal.sessions and survey.has_hashes)
        sent += len(runner.play(job.plan(), outcome).sent)
        findings.update(job.findings())
    return account_of(survey, fidelity_of(findings), sent=sent, stopped=None)
