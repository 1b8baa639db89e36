"""Thresholds: which texts are one, what they say, and what is wrong with the others."""

import pytest

from measure.thresholds import Threshold, parse_threshold
from tracefile.records.errors import InputError

METRICS = ("cached", "ttft", "tpot", "itl", "e2e")
LABELS = ("predicted", "run.1", "run")


def parsed(text: str) -> Threshold:
    return parse_threshold("--gate", text, metrics=METRICS, labels=LABELS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft.p90<=500ms", (None, None, "ttft", 90.0, None, "<=", 500.0, "ms")),
        ("ttft.p99.9 < 1.5s", (None, None, "ttft", 99.9, None, "<", 1500.0, "ms")),
        (
            "predicted.turns2+.ttft.p50.error<=10%",
            ("predicted", "turns2+", "ttft", 50.0, "error", "<=", 0.1, "share"),
        ),
        ("run.1.all.cached.exact_share>=99%", ("run.1", "all", "cached", None, "exact_share", ">=", 0.99, "share")),
        ("load:4-7.itl.p99>1e-3", (None, "load:4-7", "itl", 99.0, None, ">", 0.001, "number")),
        ("cached.bias>=-1%", (None, None, "cached", None, "bias", ">=", -0.01, "share")),
    ],
)
def test_threshold_has_value_and_limit(text: str, expected: tuple[object, ...]) -> None:
    result = parsed(text)
    assert result.text == text.strip()
    assert (
        result.label,
        result.cohort,
        result.metric,
        result.percentile,
        result.key,
        result.op,
        result.limit,
        result.unit,
    ) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft.p90", "not a threshold"),
        ("p90<=500ms", "no metric 'p90'; expected one of cached, ttft, tpot, itl, e2e"),
        ("predicted.turn9.ttft.p50.error<=1", "no cohort 'turn9'; expected one of all, turn1, turns2+"),
        ("other.all.ttft.p50.error<=1", "no compared label 'other'; expected one of predicted, run.1, run"),
        ("ttft.p0<=1s", "'p0'; expected pNN, a key, or pNN.key"),
    ],
)
def test_invalid_threshold_error(text: str, message: str) -> None:
    with pytest.raises(InputError, match="--gate") as raised:
        parsed(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("ttft.p50<=5ms", 5.0, True),
        ("ttft.p50<5ms", 5.0, False),
        ("ttft.p50>=5ms", 5.0, True),
        ("ttft.p50>5ms", 5.0, False),
    ],
)
def test_threshold_passes_or_fails(text: str, value: float, holds: bool) -> None:
    assert parsed(text).holds(value) is holds
