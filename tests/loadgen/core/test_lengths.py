"""Lengths as flags say them, and what is drawn from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.draws import Stream, draw_array
from loadgen.core.lengthdraws import quantities
from loadgen.core.lengths import UNBOUNDED, LengthDistribution, parse_lengths
from tracefile.records.errors import InputError

BITS = draw_array(1, Stream.PROMPT_LENGTH, np.arange(50_000, dtype=np.uint64))


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("7", LengthDistribution(7, 7)),
        ("1000000:1048577", LengthDistribution(1_000_000, 1_048_577)),
        ("64:11000", LengthDistribution(64, 11000)),
        ("normal:500,100", LengthDistribution(1, UNBOUNDED, "normal", mean=500, sd=100)),
        ("normal:500,100,200,800", LengthDistribution(200, 800, "normal", mean=500, sd=100)),
        ("lognormal:500,1000", LengthDistribution(1, UNBOUNDED, "lognormal", mean=500, sd=1000)),
        ("zipf:1.5,10,1000", LengthDistribution(10, 1000, "zipf", exponent=1.5)),
    ],
)
def test_length_flags_round_trip(text: str, span: LengthDistribution) -> None:
    assert parse_lengths("--x", text, minimum=1, integers=True) == span
    assert str(span) == text


@pytest.mark.parametrize(
    "text",
    ["", "9:3", "0", "1.5", "-1", "normal:5", "normal:5,1,2", "normal:0,1", "zipf:1,0,5", "zipf:1,5", "pareto:1,2"],
)
def test_bad_spans_name_their_flag(text: str) -> None:
    with pytest.raises(InputError, match=r"--x: .*expected integers of 1 or more as N, MIN:MAX, normal:"):
        parse_lengths("--x", text, minimum=1, integers=True)


@pytest.mark.parametrize(("shape", "sd"), [("normal", 100), ("lognormal", 400)])
def test_distributions_have_mean_and_deviation(shape: str, sd: float) -> None:
    drawn = quantities(LengthDistribution(1, 1e6, shape, mean=500, sd=sd), BITS)  # type: ignore[arg-type]
    assert drawn.mean() == pytest.approx(500, rel=0.02)
    assert drawn.std() == pytest.approx(sd, rel=0.05)


@pytest.mark.parametrize("exponent", [0.8, 1.0, 2.0])
def test_zipf_lengths_fall_as_a_power(exponent: float) -> None:
    drawn = quantities(LengthDistribution(1, 1000, "zipf", exponent=exponent), BITS)
    assert drawn.min() == 1
    assert drawn.max() <= 1000
    # Between decades of a power law of density x^-s, counts are as the integrals are.
    counts = [((drawn >= low) & (drawn < high)).sum() for low, high in ((1, 10), (10, 100))]
    power = 1 - exponent
    integrals = [np.log(10)] * 2 if power == 0 else [(10**power - 1) / power, (100**power - 10**power) / power]
    assert counts[0] / counts[1] == pytest.approx(integrals[0] / integrals[1], rel=0.05)


@given(
    st.sampled_from(["uniform", "normal", "lognormal", "zipf"]),
    st.integers(1, 1000),
    st.integers(0, 1000),
    st.floats(0, 3),
    st.integers(0, 40_000),
)
def test_draws_are_within_bounds(shape: str, low: int, more: int, spread: float, start: int) -> None:
    span = LengthDistribution(low, low + more, shape, mean=low + 1, sd=spread * low, exponent=spread)  # type: ignore[arg-type]
    drawn = quantities(span, BITS[start : start + 100])
    assert drawn.min() >= low
    assert drawn.max() <= low + more
    # A draw depends on its own bits alone.
    assert drawn[7] == quantities(span, BITS[start + 7 : start + 8])[0]
