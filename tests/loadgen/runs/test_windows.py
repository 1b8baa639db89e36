"""The last ten seconds of a run, and nothing older."""

from loadgen.runs.progress import RateWindow, RecentWindow
from measure.tally import Recent, Sample


def recent(*ttft_ms: float) -> Recent:
    sample = Sample()
    sample.extend(ttft_ms)
    return Recent(ttft_ms=sample)


def test_samples_leave_after_ten_seconds() -> None:
    window = RecentWindow()
    window.add(1.0, recent(100.0, 200.0))
    window.add(5.0, recent(300.0))
    assert window.whole.ttft_ms.count == 3
    window.forget(11.5)
    assert window.whole.ttft_ms.count == 1
    assert round(window.whole.ttft_ms.quantile(0.0)) == 300
    window.whole.ttft_ms.check_integrity()
    window.forget(20.0)
    assert (window.whole.ttft_ms.count, window.whole.ttft_ms.buckets) == (0, {})


def test_a_rate_is_that_of_the_last_ten_seconds() -> None:
    window = RateWindow()
    assert window.per_s() == 0.0
    window.add(2.0, 100)
    assert window.per_s() == 50.0  # since t = 0, as long as that is all there is
    for second in range(3, 31):
        window.add(float(second), 100 + 10 * (second - 2))
    assert window.per_s() == 10.0
