"""Ensembles against values worked out by hand: the middle, the band, what an interval draws, and what is said of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from measure.resampling import draw_weights
from measure.runs import Run, load_run
from measure.survival import CENSORED, EVENT, FAILED, LatencySample, latency_sample
from report.compare.cells import describe, evaluate, measure, verdict
from report.compare.ensembles import coverage, measure_ensemble, middle_run, with_members
from report.compare.results import CachedAgreement, Coverage, DurationError, PairCohort, QuantileError
from tracefile.files.writing import TraceWriter
from tracefile.records.arrays import FloatArray
from tracefile.records.schema import Meta, Record, RequestId


def waits_of(*times: float, given_up: tuple[float, ...] = (), failed: tuple[float, ...] = ()) -> LatencySample:
    ends = [EVENT] * len(times) + [CENSORED] * len(given_up) + [FAILED] * len(failed)
    return latency_sample(np.array([*times, *given_up, *failed]), np.array(ends, dtype=np.int8), np.arange(len(ends)))


def run_of(path: Path, ttfts_ms: list[float], cached: int = 0, prompt: int = 100) -> Run:
    with TraceWriter(path, Meta(source="tap")) as writer:
        for number, ttft_ms in enumerate(ttfts_ms):
            writer.write(
                Record(
                    request_id=RequestId(f"r{number}"),
                    arrival_ms=float(number),
                    ttft_ms=ttft_ms,
                    e2e_ms=ttft_ms,
                    prompt_tokens=prompt + number,
                    cached_tokens=cached,
                )
            )
    return load_run("captured", path)


def test_median_and_band_are_order_statistics() -> None:
    # p50 of two waits is the first: 10, 12 and 14; p90 the second: 20, 30 and 40.
    cell = measure_ensemble([waits_of(10, 20), waits_of(12, 30), waits_of(14, 40)], np.arange(2), None)
    reported = describe(cell)
    assert (reported.n, reported.events, cell.members) == (2, 2, 3)
    assert (reported.p50.value_ms, reported.p50.low_ms, reported.p50.high_ms) == (12.0, 10.0, 14.0)
    assert (reported.p90.value_ms, reported.p90.low_ms, reported.p90.high_ms) == (30.0, 20.0, 40.0)
    # At 12 ms one member still has all waiting, the two others half; at 30 two have none.
    middle = dict(zip(cell.curve.time_ms.tolist(), cell.curve.survival.tolist(), strict=True))
    assert middle == {10.0: 1.0, 12.0: 0.5, 14.0: 0.5, 20.0: 0.5, 30.0: 0.0, 40.0: 0.0}
    assert cell.curve.low.tolist()[:2] == [0.5, 0.5]
    assert cell.curve.high.tolist()[-2:] == [0.5, 0.0]


def test_quantile_beyond_most_members_is_a_bound() -> None:
    # Two of three members lose a request before its token: their p90 is beyond what they saw, and so is the middle's.
    members = [waits_of(10, 20), waits_of(12, given_up=(30,)), waits_of(14, given_up=(40,))]
    reported = describe(measure_ensemble(members, np.arange(2), None))
    assert (reported.p90.value_ms, reported.p90.beyond_ms, reported.p90.low_ms, reported.p90.high_ms) == (
        None,
        40.0,
        20.0,
        None,
    )
    assert (reported.n, reported.events, reported.censored) == (2, 1, 1)


def test_median_member_of_each_request(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / f"{n}.jsonl", ttfts, 16 * n)
        for n, ttfts in enumerate([[9.0, 40.0], [7.0, 50.0], [8.0, 30.0]])
    ]
    lost = replace(runs[0], ttft_ms=np.array([np.nan, np.nan]))
    assert middle_run(runs).ttft_ms.tolist() == [8.0, 40.0]
    assert middle_run(runs).cached_tokens.tolist() == [16, 16]
    # A request that most members never answer has no middle: 7 is one of three, 8 one of two.
    assert np.isnan(middle_run([lost, lost, runs[1]]).ttft_ms).all()
    assert middle_run([lost, runs[2]]).ttft_ms.tolist() == [8.0, 30.0]


def test_bootstrap_samples_members_and_sessions() -> None:
    truth = waits_of(*[100.0] * 30)
    members = [waits_of(*[ms] * 30) for ms in (90.0, 100.0, 130.0)]
    weights = draw_weights(30, 60, seed=0)
    local, other = measure(truth, np.arange(30), weights), measure_ensemble(members, np.arange(30), weights)
    assert other.resampled_ms is not None
    assert other.resampled_ms[:4, 0].tolist() == [90.0, 100.0, 130.0, 90.0]
    result = evaluate(local, other, None)
    assert result.p50 is not None
    assert (result.p50.error, result.p50.inside_band) == (0.0, True)
    assert [result.p50.low, result.p50.high] == pytest.approx([-0.1, 0.3])
    # From 90 to 130 ms around 100: the band tells nothing of 5 %, though the middle is exact.
    assert result.p50.band == pytest.approx(0.2)
    assert result.verdict == "too uncertain to say, band ± 20.0 % at p50"
    # W1 is to all members together: a third is 10 ms early, a third 30 ms late.
    assert result.w1_ms == pytest.approx((10 + 30) / 3)


FAST, MIXED = (2.0,) * 100, (2.0,) * 95


@pytest.mark.parametrize(
    ("captured", "member", "p99", "message"),
    [
        # Five of a hundred time out at 30 s, or fail: no forecast up to 400 ms holds such a p99.
        (waits_of(*MIXED, given_up=(30_000.0,) * 5), waits_of(*FAST[:-5], *[400.0] * 5), ("one", False), "off, p99 on"),
        (waits_of(*MIXED, failed=(5.0,) * 5), waits_of(*FAST[:-5], *[400.0] * 5), ("one", False), "off, p99 on one"),
        # Clients that left after 50 ms may have waited for 400: nobody knows.
        (waits_of(*MIXED, given_up=(50.0,) * 5), waits_of(*FAST[:-5], *[400.0] * 5), ("undecided", None), "undecided"),
        # Failures that were forecast, and clients that left in both.
        (waits_of(*MIXED, failed=(5.0,) * 5), waits_of(*MIXED, failed=(9.0,) * 5), ("neither", True), "within band"),
        (waits_of(*MIXED, given_up=(50.0,) * 5), waits_of(*MIXED, given_up=(60.0,) * 5), ("neither", True), "within"),
        # The forecast alone never gets there.
        (waits_of(*FAST), waits_of(*MIXED, failed=(5.0,) * 5), ("one", False), "off, p99 on one side"),
    ],
)
def test_quantile_that_only_one_side_reaches_counts(
    captured: LatencySample, member: LatencySample, p99: tuple[str, bool | None], message: str
) -> None:
    rows = np.arange(100)
    result = evaluate(measure(captured, rows, None), measure_ensemble([member] * 3, rows, None), None)
    assert result.p50 is not None
    assert (result.p50.error, result.p50.inside_band, result.p50.reached) == (0.0, True, "both")
    assert result.p99 is not None
    assert (result.p99.error, result.p99.reached, result.p99.inside_band) == (None, *p99)
    assert message in (result.verdict or "")
    nothing = DurationError(n_truth=0, n_other=0, evaluated=False)
    cached = CachedAgreement(joined=0, n=0, unreported_truth=0, unreported_other=0, evaluated=False)
    counted = coverage({"all": PairCohort(cached=cached, ttft=result, tpot=nothing, itl=nothing, e2e=nothing)})
    assert (counted.quantiles, counted.undecided) == ((2, 1) if p99[1] is None else (3, 0))
    assert counted.inside == 2 + (p99[1] is True)


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ({"p50": (0.01, True, None), "p90": (0.02, True, None), "p99": (0.3, True, 0.4)}, "within band"),
        # Against the mean of two captures, where the load was captured again.
        ({"p50": (0.01, True, 0.0), "p90": (0.2, False, -0.15), "p99": (0.3, True, 0.2)}, "off by 15.0 %"),
        ({"p50": (0.4, False, 0.1), "p90": (0.2, False, None), "p99": (0.07, False, None)}, "off by 20.0 %"),
        ({"p50": None, "p90": None, "p99": None}, "not comparable"),
    ],
)
def test_the_verdict_is_the_worst_outside_the_band(
    errors: dict[str, tuple[float, bool, float | None] | None], message: str
) -> None:
    def error_of(error: float, inside_band: bool, repeat_error: float | None) -> QuantileError:
        return QuantileError(error=error, signed_error=error, inside_band=inside_band, repeat_error=repeat_error)

    assert verdict({level: None if item is None else error_of(*item) for level, item in errors.items()}) == message


def test_p_value_compares_capture_and_members() -> None:
    """Members and captures whose times share one speed, 10 % apart: one that is 15 % off is told in most cases."""
    rng = np.random.default_rng(3)
    shape, rows = rng.lognormal(4.0, 0.5, 60), np.arange(60)

    def result_for(captured: FloatArray, speeds: FloatArray) -> Coverage:
        other = measure_ensemble([waits_of(*(shape * item)) for item in speeds], rows, None)
        truth = measure(waits_of(*captured), rows, None)
        cohort = evaluate(truth, other, None)
        nothing = DurationError(n_truth=0, n_other=0, evaluated=False)
        cached = CachedAgreement(joined=0, n=0, unreported_truth=0, unreported_other=0, evaluated=False)
        pair = PairCohort(cached=cached, ttft=cohort, tpot=nothing, itl=nothing, e2e=nothing)
        return with_members(coverage({"all": pair}), [(pair, truth, other)])

    right, noise = [], []
    for _ in range(30):
        result = result_for(shape * np.exp(rng.normal(0.0, 0.1)), np.exp(rng.normal(0.0, 0.1, 39)))
        right.append(result.p_value or 0.0)
        noise.append(result.noise["p50"])
    assert sum(p >= 0.05 for p in right) >= 27
    assert np.median(noise) == pytest.approx(2.3 * 0.1, rel=0.3)
    steady = np.exp(rng.normal(0.0, 0.01, 39))
    assert result_for(shape * 1.15, steady).p_value == pytest.approx(1 / 40)
    # Failures that no member has, and such as all have.
    timed_out = np.append(shape[:-6], [np.inf] * 6)
    assert result_for(shape, np.ones(39)).p_value == 1.0
    assert result_for(np.where(np.isinf(timed_out), 1e9, timed_out), np.ones(39)).p_value == pytest.approx(1 / 40)


def test_coverage_counts_quantiles_of_evaluated_cohorts() -> None:
    def cohort(n: int, *inside: bool | None, evaluated: bool = True) -> PairCohort:
        errors = [None if item is None else QuantileError(error=0, signed_error=0, inside_band=item) for item in inside]
        ttft = DurationError(n_truth=n, n_other=n, evaluated=evaluated, p50=errors[0], p90=errors[1], p99=errors[2])
        nothing = DurationError(n_truth=0, n_other=0, evaluated=False)
        cached = CachedAgreement(joined=0, n=0, unreported_truth=0, unreported_other=0, evaluated=False)
        return PairCohort(cached=cached, ttft=ttft, tpot=nothing, itl=nothing, e2e=nothing)

    result = coverage(
        {
            "all": cohort(90, True, True, False),
            "turn1": cohort(90, False, False, False),  # all requests once more: counted already
            "turns2+": cohort(29, False, False, False, evaluated=False),
            "load:1": cohort(40, False, False, False),  # no cohort of its own
            "uncached:0-255": cohort(40, True, None, True),
        }
    )
    assert (result.quantiles, result.inside, result.share) == (5, 4, 0.8)
    assert coverage({}).share is None
