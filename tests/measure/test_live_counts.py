"""Samples and tallies: exact while small, close once large, and the same whichever process saw what."""

import pickle
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure import live_counts
from measure.live_counts import LiveCounts, Sample
from measure.quantiles import quantile
from tracefile.records.schema import Record, RequestId


def sample_of(values: Sequence[float]) -> Sample:
    sample = Sample()
    sample.extend(values)
    return sample


def test_a_small_sample_is_exact() -> None:
    sample = sample_of([float(value) for value in range(100)])
    assert [sample.quantile(share) for share in (0.0, 0.5, 0.99, 1.0)] == [0.0, 49.0, 98.0, 99.0]
    assert (sample.count, sample.total, sample.max) == (100, 4950.0, 99.0)
    sample.add(-1.0)  # a clock that steps back by a microsecond is no error
    assert sample.quantile(0.0) == 0.0


durations = st.lists(st.floats(0.0, 1e7, allow_subnormal=False).map(lambda value: round(value, 3)), max_size=50)


@given(st.lists(durations, min_size=1, max_size=4), st.integers(0, 15), st.floats(0.0, 1.0))
def test_merged_samples_equal_the_complete_sample(parts: list[list[float]], folded: int, share: float) -> None:
    merged = Sample()
    for index, part in enumerate(parts):
        sample = sample_of(part)
        if folded >> index & 1:
            sample.fold()
        merged.merge(pickle.loads(pickle.dumps(sample)))
        merged.check_integrity()
    values = sorted(value for part in parts for value in part)
    assert merged.count == len(values)
    assert merged.total == pytest.approx(sum(values))
    assert merged.max == max(values, default=0.0)
    if values:
        exact = quantile(values, share)
        assert merged.quantile(share) == pytest.approx(exact, rel=0.001, abs=1e-9)


def test_a_large_sample_has_bounded_memory_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_counts, "EXACT_VALUES", 1000)
    drawn = random.Random(1)
    values = [drawn.lognormvariate(3.0, 1.5) for _ in range(50_000)]
    sample = Sample()
    for start in range(0, len(values), 16):
        sample.extend(values[start : start + 16])
        assert len(sample.values) <= 1000
    sample.check_integrity()
    values.sort()
    for share in (0.5, 0.9, 0.99):
        assert sample.quantile(share) == pytest.approx(values[int(share * len(values))], rel=0.001)
    assert sample.buckets is not None
    assert len(sample.buckets) < 8000  # grows with the values' range, not with their number


def record(name: str, **fields: object) -> Record:
    shape = {"arrival_ms": 12.0, "scheduled_ms": 10.0, "ttft_ms": 30.0, "itl_ms": [8.0, 4.0], "itl_tokens": [2, 1]}
    ended = {"e2e_ms": 50.0, "prompt_tokens": 100, "cached_tokens": 64, "output_tokens": 4, "max_tokens": 4}
    return Record(request_id=RequestId(name), **{**shape, **ended, **fields})  # type: ignore[arg-type]


def tally_of(*records: Record) -> LiveCounts:
    tally = LiveCounts()
    for each in records:
        tally.start()
        tally.in_flight -= 1
        tally.finish(each)
    tally.check_integrity()
    return tally


A, B = (
    record("a"),
    record("b", status="error", error="http_400", http_status=400, ttft_ms=None, itl_ms=[], itl_tokens=[]),
)


def test_request_counts() -> None:
    tally = tally_of(A, B)
    assert (tally.started, tally.ended, tally.failed, tally.refused) == (2, 2, 1, 1)
    assert tally.recent.ttft_ms.values.tolist() == [30.0]
    assert tally.recent.itl_ms.values.tolist() == [4.0, 4.0]  # per token of each read
    assert tally.recent.lag_ms.values.tolist() == [2.0, 2.0]
    assert (tally.prompt_tokens, tally.looked_up_tokens, tally.cached_tokens) == (200, 200, 128)


def test_only_refusals_needs_as_many_refusals_as_requests_in_flight() -> None:
    tally = tally_of(*[B] * 4)
    assert tally.only_refusals
    tally.in_flight = 5  # asked for earlier perhaps, and only slower to come
    assert not tally.only_refusals
    tally = tally_of(B, B)
    assert not tally.only_refusals
    assert not tally_of(*[B] * 9, A).only_refusals


def test_recent_samples_are_since_the_last_pop() -> None:
    tally = tally_of(A)
    counts, first = tally.counts(), tally.pop_recent()
    tally.start()
    assert (first.ttft_ms.count, tally.pop_recent().ttft_ms.count) == (1, 0)
    assert [len(sample.values) for sample in first.samples] == [0, 0, 0], "told by bucket: small, however many came"
    assert (counts.started, tally.counts().started) == (1, 2)
    tally.statuses["ok"] += 1
    assert counts.statuses == {"ok": 1}  # told is told
