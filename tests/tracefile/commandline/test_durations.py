"""Durations are read with their unit only."""

import argparse

import pytest

from tracefile.commandline.durations import duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", 30.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        ("0", 0.0),
        ("0.1ms", 0.0001),
    ],
)
def test_a_duration_is_a_number_with_its_unit(text: str, expected: float) -> None:
    assert duration(text) == expected


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 s", "1e3s", "1w", "1m30s", "nan", "inf", "5S"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number and its unit"):
        duration(text)


def test_number_without_unit_error_suggests_units() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"'30' has no unit; expected 30s, 30ms, 30m or 30h"):
        duration("30")
