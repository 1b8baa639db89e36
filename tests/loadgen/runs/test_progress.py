"""What a run's shards say, as one status: sums, the last seconds, and who has fallen silent."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.runs.progress import RunProgress, remaining_s
from loadgen.runs.shardmessages import Done, Failed, Progress
from loadgen.runs.shards import Zero
from measure.tally import Counts, Recent, Sample, Tally


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one value is how late it is, in seconds since t = 0."""
    now_s = [0.0]
    monkeypatch.setattr(RunProgress, "elapsed_s", lambda self: now_s[0])
    return now_s


def progress_of(
    shards: int, planned: int | None = None, last_send_s: float | None = None, ends_s: float | None = None
) -> RunProgress:
    where = [f"process {index}" for index in range(shards)]
    return RunProgress(Zero(0, 0), where, planned=planned, last_send_s=last_send_s, ends_s=ends_s)


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
    progress = progress_of(1, last_send_s=30.0)
    clock[0] = 12.0
    assert progress.status().remaining_s == 18.0
    assert progress_of(1).status().remaining_s is None


def test_a_hard_end_is_the_end(clock: list[float]) -> None:
    progress = progress_of(1, last_send_s=30.0, ends_s=30.0)
    clock[0] = 12.0
    progress.hear(0, told(600, 6))
    assert progress.status().remaining_s == 18.0  # not the time of those in flight beyond it
    assert progress_of(1, ends_s=5.0).status().remaining_s == 0.0


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
def test_time_left_follows_the_plan_and_the_pace_of_the_whole_run(
    seen: tuple[float, int, int], planned: int | None, last_send_s: float | None, left_s: float | None
) -> None:
    assert remaining_s(*seen, planned=planned, last_send_s=last_send_s) == left_s


@given(rate=st.floats(1.0, 50.0), latency_s=st.floats(0.05, 5.0), seconds=st.integers(20, 120))
def test_time_left_of_a_steady_open_loop_does_not_jump(rate: float, latency_s: float, seconds: int) -> None:
    planned = max(1, int(rate * seconds))
    last_send_s = planned / rate
    ends: list[float] = []
    for now_s in range(1, int(last_send_s)):
        started, ended = (min(planned, max(0, int(rate * (now_s - wait_s)))) for wait_s in (0.0, latency_s))
        left_s = remaining_s(now_s, started, ended, planned=planned, last_send_s=last_send_s)
        assert left_s is not None
        ends.append(now_s + left_s)
    slack_s = latency_s + 3.0 / rate + 0.1
    assert all(last_send_s - 0.1 <= end_s <= last_send_s + 2 * latency_s + slack_s for end_s in ends)


def test_time_left_of_stages_of_unlike_requests_drifts_instead_of_jumping() -> None:
    """Four rounds as calibration sends them: 24 requests of a second each, then 76 in seven seconds, until 124 s."""
    one_round_s = [*map(float, range(24)), *(24 + turn * 7 / 76 for turn in range(76))]
    ends_s = [31.0 * lap + end_s for lap in range(4) for end_s in one_round_s]
    said = []
    for now_s in range(20, 121, 20):
        ended = sum(end_s <= now_s for end_s in ends_s)
        said.append(remaining_s(now_s, ended + 1, ended, planned=400, last_send_s=None))
    assert said == [361.0, 105.5, 74.1, 66.1, 29.9, 14.5]  # in truth 104, 84, 64, 44, 24, 4


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
