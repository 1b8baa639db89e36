"""What a run says of itself: literal lines, then its trace's metrics."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.facts import EngineFacts, PrefixCounters
from loadgen.core.settings import RunSettings
from loadgen.runs import summary as summary_module
from loadgen.runs.outcome import RunOutcome
from loadgen.runs.summary import Summary, end_run
from measure.live_counts import LiveCounts
from tests.measure.metrics.made import request, run_of
from tracefile.records.schema import Engine


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


RUN = run_of([request("a", 0.0, scheduled_ms=0.0, held=True, ttft_ms=20.0, e2e_ms=90.0)])


def driven(failures: Sequence[str] = ()) -> RunOutcome:
    tally = LiveCounts(started=4, statuses=Counter(ok=3, error=1), errors=Counter(http_503=1), held=1)
    return RunOutcome(
        tally=tally,
        findings={"seen": 2},
        digest="d" * 64,
        stopped=None,
        failures=list(failures),
        seconds=4.0,
        cpu_s=[("process 1", 3.8), ("process 2", 2.0)],
    )


@pytest.fixture
def summary_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunOutcome], Summary]:
    """Sums a run up whose trace is ``RUN``."""
    monkeypatch.setattr(summary_module, "load_run", lambda *_, **__: RUN)
    counters = (PrefixCounters(queries=0, hits=0), PrefixCounters(queries=300, hits=150))
    before, after = (EngineFacts(Engine(), counters=counted) for counted in counters)
    settings = RunSettings(url="http://x", trace=Path("t.jsonl"))
    reported: dict[str, Any] = {"pattern": "poisson", "facts": (before, after), "notes": ["mind the gap"]}
    return lambda run: end_run(run, settings, **reported).summary


def test_json_summary_is_complete(summary_of: Callable[[RunOutcome], Summary]) -> None:
    reported = msgspec.json.decode(msgspec.json.encode(summary_of(driven())))
    assert set(reported) == set(Summary.__struct_fields__)
    assert reported["findings"] == {"seen": 2}
    assert reported["client_cpu"] == 1.45
    assert [(use["process"], use["cpu"]) for use in reported["processes"]] == [
        ("worker 0", 0.95),
        ("worker 1", 0.5),
    ]
