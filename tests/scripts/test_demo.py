"""The demo's last line: errors, bands and verdict of each forecast, and the reason of those that are no success."""

from types import SimpleNamespace
from typing import Any

import pytest

from report.compare.results import QuantileError
from scripts.demo import verdict_line

TOO_UNCERTAIN = "too uncertain to say, band ± 90.0 % at p50"


def judged(warm: str | None, cold: str | None) -> Any:
    """A result of ``sim validate``: warm and cold, at the model's pace and at the capture's."""

    def pair(verdict: str | None, error: float, band: float, truth: str = "captured") -> Any:
        quantile = QuantileError(error=abs(error), signed_error=error, band=band)
        own = {"p50": quantile, "p90": quantile, "p99": None}
        ttft = SimpleNamespace(verdict=verdict, n_truth=90, judged=verdict is not None, **own)
        first = SimpleNamespace(verdict=None, n_truth=20, judged=False)
        return SimpleNamespace(
            truth=truth, cohorts={"all": SimpleNamespace(ttft=ttft), "turn1": SimpleNamespace(ttft=first)}
        )

    paces = {"predicted": None, "predicted-at-pace": 1.0712, "cold-predicted": None, "cold-predicted-at-pace": 0.931}
    return SimpleNamespace(
        forecasts={label: SimpleNamespace(pace=pace) for label, pace in paces.items()},
        pairs={
            "predicted": pair(warm, -0.02, 0.04),
            "predicted-at-pace": pair("off by 9 %", 0.09, 0.01),
            "cold-predicted": pair(cold, 0.53, 0.9, "cold"),
            "cold-predicted-at-pace": pair("off by 8 %", 0.08, 0.01, "cold"),
        },
        next_steps=["capture it again"],
    )


REASONS = (
    "steps of captured took 1.07 of their time in calibration; steps of cold took 0.93 of their time in calibration; "
    "capture it again"
)


@pytest.mark.parametrize(
    ("cold", "said", "reasons"),
    [
        ("within band", "within band", ""),
        # An error of 53 % in a band of 90 % is no success.
        (TOO_UNCERTAIN, "too uncertain to say", f". {REASONS}"),
        ("off by 31 % at p99", "outside its band in 1 of 1 cohorts", f". {REASONS}"),
    ],
)
def test_the_last_line_has_errors_bands_and_verdicts(cold: str, said: str, reasons: str) -> None:
    assert verdict_line(judged("within band", cold)) == (
        "forecasts: warm 2.0 % too short at p50 and 2.0 % too short at p90, bands ± 4.0 %: within band; "
        f"cold 53.0 % too long at p50 and 53.0 % too long at p90, bands ± 90.0 %: {said}{reasons}"
    )
