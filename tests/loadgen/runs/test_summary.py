"""What a run says of itself: literal lines, and when it says that nothing of it is to be trusted."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from engines.facts import EngineFacts, PrefixCounters
from loadgen.runs.outcome import RunOutcome, ShardUse
from loadgen.runs.summary import Summary, lateness_of, quantiles, summarize, summary_lines
from measure.samples import Sample
from measure.tally import Tally
from tracefile import Engine


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def sample_of(values: Sequence[float]) -> Sample:
    sample = Sample()
    sample.extend(values)
    return sample


def driven(lag_ms: Sequence[float], failures: Sequence[str] = ()) -> RunOutcome:
    tally = Tally(started=4, statuses=Counter(ok=3, error=1), errors=Counter(http_503=1), held=1)
    tally.prompt_tokens, tally.output_tokens, tally.exact_output = 400, 40, 3
    tally.looked_up_tokens, tally.cached_tokens, tally.cached_reported = 300, 150, 3
    tally.ttft_ms, tally.lag_ms = sample_of([10.0, 20.0, 40.0]), sample_of(lag_ms)
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
        loop_delay_ms=sample_of([0.5]),
    )


def summary_of(run: RunOutcome) -> Summary:
    counters = (PrefixCounters(queries=0, hits=0), PrefixCounters(queries=300, hits=150))
    before, after = (EngineFacts(Engine(), counters=counted) for counted in counters)
    return summarize(run, pattern="poisson", trace=Path("t.jsonl"), facts=(before, after), notes=["mind the gap"])


def test_the_summary_in_lines() -> None:
    assert summary_lines(summary_of(driven([0.1, 0.2, 0.3])), ["beside              it"]) == [
        "poisson: 4 sent in 4.0 s: 1 error, 3 ok",
        "  errors              1 http_503",
        "  TTFT                p50     20.00  p90     40.00  p99     40.00  max     40.00 ms  n 3",
        "  lag                 p50      0.20  p90      0.30  p99      0.30  max      0.30 ms  n 3",
        "  loop delay          p50      0.50  p90      0.50  p99      0.50  max      0.50 ms  n 1",
        "  cached              50.0% of prompt tokens (reported for 3)",
        "  output              40 tokens; completed requests with the length asked for: 100.0%",
        "  throughput          0.8 completed requests, 100 prompt and 10 output tokens a second",
        "  client              0 requests late by more than 5.0 ms; shard 50%, sender 95% of a core; "
        "1 queued by the concurrency limit",
        "  trace               t.jsonl",
        f"  workload            {'d' * 64}",
        f"  sent                {'e' * 64}",
        "  engine's counters   150 of 300 tokens looked up were hits",
        "  beside              it",
        "  note: client busy: its sender 0 used 95% of a core; give it less load, or more --procs",
        "  note: mind the gap",
    ]


def test_what_went_wrong_stands_before_any_number() -> None:
    lines = summary_lines(summary_of(driven([0.1, 7.0], ["shard 1: process 2 was ended by SIGKILL"])))
    assert lines[1:3] == [
        "  FAILED: shard 1: process 2 was ended by SIGKILL",
        "  CLIENT LATE: lag p99 7.0 ms, 1 requests late by more than 5.0 ms; trust no latency of this run: "
        "repeat it on an idle machine; loadgen selftest tells what this one can send",
    ]
    assert "  sent                unknown: a process died" in lines


@pytest.mark.parametrize(
    ("lag_ms", "ttft_ms", "requests", "run"),
    [
        ([1.0] * 100, [100.0], 0, False),
        ([1.0] * 98 + [6.0] * 2, [100.0], 2, True),  # the p99 of a hundred is the 99th
        ([1.0] * 99 + [6.0], [100.0], 1, False),
        ([1.0] * 199 + [6.0], [100.0], 1, False),
        ([6.0] * 10, [1000.0], 0, False),  # 1 % of a slow engine's TTFT
        ([], [100.0], 0, False),
        ([6.0], [], 1, True),
    ],
)
def test_who_is_late(lag_ms: list[float], ttft_ms: list[float], requests: int, run: bool) -> None:
    found = lateness_of(sample_of(lag_ms), quantiles(sample_of(ttft_ms)))
    assert (found.requests, found.run) == (requests, run)


def test_the_json_has_it_all() -> None:
    told = msgspec.json.decode(msgspec.json.encode(summary_of(driven([0.1]))))
    assert set(told) == set(Summary.__struct_fields__)
    assert told["findings"] == {"seen": 2}
    assert told["client_cpu"] == 1.8
    assert [(use["process"], use["cpu"]) for use in told["processes"]] == [
        ("shard 0", 0.25),
        ("sender 0", 0.95),
        ("shard 1", 0.5),
        ("sender 1", 0.1),
    ]
