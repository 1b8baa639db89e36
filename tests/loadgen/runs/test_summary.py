"""What a run says of itself: literal lines, then its trace's metrics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engines.facts import EngineFacts, PrefixCounters
from loadgen.runs.outcome import RunOutcome, ShardUse
from loadgen.runs.summary import Summary, length_notes, summarize, summary_lines
from measure.metrics.tables import metric_lines
from measure.metrics.trace import measure_run
from measure.tally import Tally
from tests.measure.metrics.made import request, run_of
from tracefile import Engine


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


METRICS = measure_run(run_of([request("a", 0.0, scheduled_ms=0.0, held=True, ttft_ms=20.0, e2e_ms=90.0)]))


def driven(failures: Sequence[str] = ()) -> RunOutcome:
    tally = Tally(started=4, statuses=Counter(ok=3, error=1), errors=Counter(http_503=1), held=1)
    return RunOutcome(
        tally=tally,
        findings={"seen": 2},
        digest="d" * 64,
        sent_digest=None if failures else "e" * 64,
        stopped=None,
        failures=list(failures),
        seconds=4.0,
        shards=[
            ShardUse(where="process 1", sent=2, shard_cpu_s=1.0, sender_cpu_s=3.8),
            ShardUse(where="process 2", sent=2, shard_cpu_s=2.0, sender_cpu_s=0.4),
        ],
    )


def summary_of(run: RunOutcome) -> Summary:
    counters = (PrefixCounters(queries=0, hits=0), PrefixCounters(queries=300, hits=150))
    before, after = (EngineFacts(Engine(), counters=counted) for counted in counters)
    facts, notes = (before, after), ["mind the gap"]
    return summarize(run, METRICS, pattern="poisson", trace=Path("t.jsonl"), facts=facts, notes=notes)


def test_requests_beyond_the_engines_length_are_named() -> None:
    lengths = {"status": "error", "output_tokens": None, "prompt_tokens": 90}
    run = run_of([request("a", 0.0, max_tokens=10, **lengths), request("b", 1.0, max_tokens=11, **lengths)])
    refused = replace(driven(), tally=Tally(errors=Counter(http_400=2)))
    assert length_notes(run, refused, 100) == [
        "1 of 2 requests refused with HTTP 400 are longer than the engine's max_model_len of 100 tokens, prompt and "
        "output together"
    ]
    assert length_notes(run, refused, 101) == length_notes(run, refused, None) == length_notes(run, driven(), 9) == []


def test_the_summary_in_lines() -> None:
    assert summary_lines(summary_of(driven()), ["beside              it"]) == [
        "poisson: 4 sent in 4.0 s: 1 error, 3 ok",
        "  errors              1 http_503",
        "  client              shard 50%, sender 95% of a core; 1 queued by the concurrency limit",
        "  trace               t.jsonl",
        f"  workload            {'d' * 64}",
        f"  sent                {'e' * 64}",
        "  engine's counters   150 of 300 tokens looked up were hits",
        "  beside              it",
        "  note: client busy: its sender 0 used 95% of a core; give it less load, or more --procs",
        "  note: mind the gap",
        *metric_lines(METRICS),
    ]


def test_what_went_wrong_stands_before_any_number() -> None:
    lines = summary_lines(summary_of(driven(["shard 1: process 2 was ended by SIGKILL"])))
    assert lines[1] == "  FAILED: shard 1: process 2 was ended by SIGKILL"
    assert "  sent                unknown: a process died" in lines


def test_the_json_has_it_all() -> None:
    told = msgspec.json.decode(msgspec.json.encode(summary_of(driven())))
    assert set(told) == set(Summary.__struct_fields__)
    assert told["findings"] == {"seen": 2}
    assert told["client_cpu"] == 1.8
    assert told["forms"] in ("compiled", "python")
    assert [(use["process"], use["cpu"]) for use in told["processes"]] == [
        ("shard 0", 0.25),
        ("sender 0", 0.95),
        ("shard 1", 0.5),
        ("sender 1", 0.1),
    ]
