"""A run's progress: sums of its workers, the last seconds, the time left; and how it is shown."""

from collections import Counter

import pytest

from loadgen.runs.messages import Progress
from loadgen.runs.progress import RunProgress, remaining_s
from loadgen.runs.view import status_line
from measure.live_counts import Counts, Recent, Sample


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one value is how late it is, in seconds since t = 0."""
    now_s = [0.0]
    monkeypatch.setattr(RunProgress, "elapsed_s", lambda self: now_s[0])
    return now_s


def progress_of(workers: int, planned: int | None = None, last_send_s: float | None = None) -> RunProgress:
    return RunProgress(0, workers, planned=planned, last_send_s=last_send_s)


def report_of(started: int, ok: int, error: int = 0, ttft_ms: tuple[float, ...] = ()) -> Progress:
    counts = Counts(started=started, in_flight=started - ok - error, statuses=Counter(ok=ok, error=error))
    counts.looked_up_tokens, counts.cached_tokens, counts.output_tokens = 100 * ok, 40 * ok, 10 * ok
    sample = Sample()
    sample.extend(ttft_ms)
    return Progress(counts, Recent(ttft_ms=sample))


def test_workers_add_up(clock: list[float]) -> None:
    progress = progress_of(2, planned=40)
    clock[0] = 2.0
    progress.receive(0, report_of(10, 7, ttft_ms=(20.0,)))
    progress.receive(1, report_of(8, 2, 1, ttft_ms=(40.0, 60.0)))
    status = progress.status()
    counts = status.counts
    assert (counts.started, counts.in_flight, counts.statuses["ok"], counts.failed) == (18, 8, 9, 1)
    assert (status.rate, status.output_tokens_per_s, status.hit_rate) == (9.0, 45.0, 0.4)
    assert status.remaining_s == 6.0  # 30 of 40 are not over, at 5 a second
    assert status.ttft is not None
    assert status.ttft[0] == pytest.approx(40.0, rel=0.001)
    assert (status.itl, status.stopping) == (None, None)
    line = "0:02 · sent 18/40 · in flight 8 · done 9 · errors 1 · 9.0/s · TTFT p50 40.0 p99 60.0 ms · cached 40% · "
    assert status_line(status) == line + "0:06 left"
    clock[0] = 13.0
    assert progress.status().ttft is None  # samples leave after ten seconds


@pytest.mark.parametrize(
    ("seen", "planned", "last_send_s", "left_s"),
    [
        ((10.0, 20, 15), 40, None, 16.7),  # closed loop: 25 are left at 1.5 a second
        ((10.0, 20, 15), 200, 90.0, 83.3),  # open loop: 80 s of sends, then those in flight
        ((10.0, 16, 0), 200, 90.0, 100.0),  # none has ended: half of those started count
        ((95.0, 200, 190), 200, 90.0, 5.0),  # all are sent
        ((95.0, 200, 200), 200, 90.0, 0.0),
        ((30.0, 60, 58), None, 60.0, 31.0),  # a duration alone
        ((30.0, 60, 58), None, None, None),
        ((0.0, 0, 0), 200, None, None),
        ((0.0, 0, 0), 200, 90.0, 90.0),
    ],
)
def test_remaining_time_from_plan_and_mean_rate(
    seen: tuple[float, int, int], planned: int | None, last_send_s: float | None, left_s: float | None
) -> None:
    assert remaining_s(*seen, planned=planned, last_send_s=last_send_s) == left_s
