"""The demo's last line: within band, or the reason."""

from types import SimpleNamespace
from typing import Any

from scripts.demo import verdict_line


def judged(warm: str | None, cold: str | None) -> Any:
    """A result of ``sim validate``: warm and cold, at the model's pace and at the capture's."""

    def pair(verdict: str | None, truth: str = "captured") -> Any:
        ttft = SimpleNamespace(verdict=verdict, n_truth=90, judged=verdict is not None)
        first = SimpleNamespace(verdict=None, n_truth=20, judged=False)
        return SimpleNamespace(
            truth=truth, cohorts={"all": SimpleNamespace(ttft=ttft), "turn1": SimpleNamespace(ttft=first)}
        )

    paces = {"predicted": None, "predicted-at-pace": 1.0712, "cold-predicted": None, "cold-predicted-at-pace": 0.931}
    return SimpleNamespace(
        forecasts={label: SimpleNamespace(pace=pace) for label, pace in paces.items()},
        pairs={
            "predicted": pair(warm),
            "predicted-at-pace": pair("off by 9 %"),
            "cold-predicted": pair(cold, "cold"),
            "cold-predicted-at-pace": pair("off by 8 %", "cold"),
        },
        next_steps=["capture it again"],
    )


def test_within_band_is_said_of_every_judged_cohort() -> None:
    assert (
        verdict_line(judged("within band", "within band")) == "forecasts: within band in all 2 cohorts, warm and cold"
    )


def test_a_miss_has_its_cohort_and_the_likeliest_reason() -> None:
    assert verdict_line(judged("within band", "off by 31 % at p99")) == (
        "forecasts: 1 of 2 cohorts outside their bands (cold-predicted all: off by 31 % at p99): "
        "steps of captured took 1.07 of their time in calibration; "
        "steps of cold took 0.93 of their time in calibration; capture it again"
    )


def test_nothing_judged_is_no_success() -> None:
    assert verdict_line(judged(None, None)) == "forecasts: not judged, as no cohort has enough requests"
