"""What a run's shards say, as one status: sums, the last seconds, and who has fallen silent."""

from collections import Counter

import pytest

from loadgen.runs.progress import RunProgress
from loadgen.runs.shardmessages import Done, Failed, Progress
from loadgen.runs.shards import Zero
from measure.samples import Sample
from measure.tally import Counts, Recent, Tally


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one value is how late it is, in seconds since t = 0."""
    now_s = [0.0]
    monkeypatch.setattr(RunProgress, "elapsed_s", lambda self: now_s[0])
    return now_s


def progress_of(shards: int, planned: int | None = None, duration_s: float | None = None) -> RunProgress:
    where = [f"process {index}" for index in range(shards)]
    return RunProgress(Zero(0, 0), where, planned=planned, duration_s=duration_s)


def told(started: int, ok: int, error: int = 0, ttft_ms: tuple[float, ...] = ()) -> Progress:
    counts = Counts(started=started, in_flight=started - ok - error, statuses=Counter(ok=ok, error=error))
    counts.looked_up_tokens, counts.cached_tokens, counts.output_tokens = 100 * ok, 40 * ok, 10 * ok
    sample = Sample()
    sample.extend(ttft_ms)
    return Progress(counts, Recent(ttft_ms=sample))


def test_shards_add_up(clock: list[float]) -> None:
    progress = progress_of(2, planned=40)
    clock[0] = 2.0
    progress.hear(0, told(10, 7, ttft_ms=(20.0,)))
    progress.hear(1, told(8, 2, 1, ttft_ms=(40.0, 60.0)))
    status = progress.status()
    assert (status.sent, status.in_flight, status.done, status.errors) == (18, 8, 9, 1)
    assert (status.rate, status.output_tokens_per_s, status.hit_rate) == (9.0, 45.0, 0.4)
    assert status.remaining_s == 6.0  # 30 of 40 are not over, at 5 a second
    assert status.ttft_p50_ms == pytest.approx(40.0, rel=0.001)
    assert (status.itl_p50_ms, status.target_rate, status.stopping) == (None, None, None)
    assert [shard.sent for shard in status.shards] == [10, 8]
    clock[0] = 13.0
    assert progress.status().ttft_p50_ms is None


def test_without_a_plan_the_end_is_when_nothing_new_starts(clock: list[float]) -> None:
    progress = progress_of(1, duration_s=30.0)
    clock[0] = 12.0
    assert progress.status().remaining_s == 18.0
    assert progress_of(1).status().remaining_s is None


def test_silence_is_told_of_those_that_should_speak(clock: list[float]) -> None:
    progress = progress_of(3)
    clock[0] = 1.0
    for shard in range(3):
        progress.hear(shard, told(1, 1))
    tally = Tally(started=5, statuses=Counter(ok=5))
    progress.hear(
        1, Done(tally=tally, findings={}, sent_share=0, stopped=None, seconds=1.0, shard_cpu_s=0.1, sender_cpu_s=0.1)
    )
    progress.hear(2, Failed("gone", is_input=False))
    clock[0] = 4.0
    status = progress.status()
    assert [shard.silent_s for shard in status.shards] == [3.0, None, None]
    assert status.sent == 1 + 5 + 1  # what a shard that is done said last is the whole of it
