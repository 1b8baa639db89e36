"""The sample of a trace's requests: parts share it, repeated captures of the same load do not."""

import pytest

from sim.latency.fittraces import MOST, first_shared, request_sample
from tracefile.records.schema import Record, RequestId


def requests(number: int, e2e_ms: float = 5.0) -> list[Record]:
    return [Record(request_id=RequestId(str(row)), arrival_ms=float(row), e2e_ms=e2e_ms) for row in range(number)]


@pytest.mark.parametrize("part", [slice(0, 500), slice(9_500, 10_000), slice(0, 10_000, 20)])
def test_sample_of_a_twentieth_is_recognised(part: slice) -> None:
    sample = request_sample(requests(10_000))
    assert (len(sample), len(set(sample))) == (MOST, MOST)
    assert first_shared(sample, requests(10_000)[part]) in sample
    assert first_shared(request_sample(requests(10_000)[part]), requests(10_000)) is not None


def test_repeated_capture_is_a_different_trace() -> None:
    assert first_shared(request_sample(requests(300)), requests(300, e2e_ms=6.0)) is None


def test_requests_without_times_are_not_sampled() -> None:
    unknown = [Record(request_id=RequestId("a"), arrival_ms=0.0)]
    assert request_sample(unknown) == []
    assert first_shared([], unknown) is None
