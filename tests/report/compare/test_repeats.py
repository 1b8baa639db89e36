"""Errors against the mean of several captures, their intervals and equivalence, worked out by hand."""

import pytest

from report.compare.cells import mean_of_captures, shrinkage, with_repeats
from report.compare.gates import parse_gate
from report.compare.results import QuantileError


def error_of(signed: float | None, low: float | None = None, high: float | None = None) -> QuantileError:
    return QuantileError(error=None if signed is None else abs(signed), signed_error=signed, low=low, high=high)


def test_three_captures_give_the_error_an_interval_and_a_margin() -> None:
    # Captures of 100, 110 and 90 ms, a forecast of 103. Logs 0, 0.0953 and −0.1054: mean −0.00335, deviation 0.1004.
    # Student's t at 95 % with 2 degrees of freedom is 2.920; 2.920 · 0.1004 / √3 = 0.1692.
    result = with_repeats(error_of(0.03), [error_of(0.10), error_of(-0.10)], is_trace=False)
    assert result.repeat_error == pytest.approx(103 / (100 * 110 * 90) ** (1 / 3) - 1)
    assert [result.repeat_low, result.repeat_high] == pytest.approx([-0.1274, 0.2240], abs=1e-4)
    assert result.captures == 3
    assert result.repeat_spread == pytest.approx(110 / 90 - 1)
    assert result.equivalence == result.repeat_high
    # One replay of 103 ms varies as a capture does: 0.1692 · √(1/3 + 1) / √(1/3) = 0.3384.
    replayed = with_repeats(error_of(0.03), [error_of(0.10), error_of(-0.10)], is_trace=True)
    assert [replayed.repeat_low, replayed.repeat_high] == pytest.approx([-0.2633, 0.4497], abs=1e-4)
    assert mean_of_captures(100.0, result) == pytest.approx((100 * 110 * 90) ** (1 / 3))


def test_larger_aa_difference_excuses_no_error() -> None:
    near = with_repeats(error_of(0.04), [error_of(0.01), error_of(-0.01)], is_trace=False)
    apart = with_repeats(error_of(0.04), [error_of(0.20), error_of(-0.15)], is_trace=False)
    assert near.equivalence == pytest.approx(0.0578, abs=1e-3)
    assert apart.equivalence is not None
    assert apart.equivalence > 0.3
    # Two captures have one degree of freedom: t is 6.31: 6.31 · 0.00704 / √2 = 0.0314, and 0.0050 below the mean.
    two = with_repeats(error_of(0.0), [error_of(0.01)], is_trace=False)
    assert two.equivalence == pytest.approx(0.0357, abs=1e-4)


def test_without_repeats_the_interval_is_over_sessions() -> None:
    result = with_repeats(error_of(0.02, low=-0.08, high=0.05), [], is_trace=False)
    assert (result.equivalence, result.repeat_error, result.captures) == (0.08, None, 1)
    assert with_repeats(error_of(0.02), [], is_trace=False).equivalence is None
    # A quantile that a repeat does not reach is not among the captures; one that the forecast does not, has no error.
    unreached = with_repeats(error_of(0.02, low=-0.08, high=0.05), [error_of(None), None], is_trace=False)
    assert (unreached.captures, unreached.equivalence) == (1, 0.08)
    assert with_repeats(error_of(None), [error_of(0.1)], is_trace=False).equivalence is None


def test_mean_of_captures_shrinks_members() -> None:
    assert shrinkage(1, 5) == 1.0
    assert shrinkage(3, 5) == pytest.approx(2 / 3)  # √((1/3 + 1/5) / (1 + 1/5))
    assert shrinkage(3, 0) == shrinkage(3, 1) == pytest.approx((2 / 3) ** 0.5)


def test_equivalence_gate_syntax() -> None:
    gate = parse_gate("predicted.turns2+.ttft.p50.equivalence<=10%", ["captured", "predicted"], ["predicted"])
    assert (gate.threshold.key, gate.threshold.limit, gate.labels) == ("equivalence", 0.10, ("predicted",))
