"""What a cell says of a forecast: inside its own band, no worse than the engine against itself, or how far off."""

from collections.abc import Mapping
from typing import Final

from measure.cohorts import ALL
from measure.wording import share
from report.compare.results import Coverage, PairCohort, QuantileError

JUDGED_LEVELS: Final = ("p50", "p90", "p99")
WITHIN_BAND: Final = "within band"
WITHIN_AA: Final = "within A/A"


def verdict(errors: Mapping[str, QuantileError | None]) -> str:
    """Of p50, p90 and p99: those outside the band must be inside A/A, or the worst of them is the verdict."""
    found = [error for level in JUDGED_LEVELS if (error := errors[level]) is not None]
    if not found:
        return "not comparable"
    outside = [error for error in found if not error.inside_band]
    if not outside:
        return WITHIN_BAND
    off = [error.error for error in outside if not error.inside_aa]
    return f"off by {share(max(off))}" if off else WITHIN_AA


def counted_cohorts(cohorts: Mapping[str, PairCohort]) -> dict[str, PairCohort]:
    """The judged ones, each set of requests once: a cohort that holds all requests is ``all`` by another name."""
    everything = cohorts[ALL].ttft.n_truth if ALL in cohorts else None
    return {
        name: cohort
        for name, cohort in cohorts.items()
        if cohort.ttft.judged and (name == ALL or cohort.ttft.n_truth != everything)
    }


def coverage(cohorts: Mapping[str, PairCohort]) -> Coverage:
    """Over the TTFT of every cohort that counts."""
    inside = [
        error.inside_band
        for cohort in counted_cohorts(cohorts).values()
        for level in JUDGED_LEVELS
        if (error := getattr(cohort.ttft, level)) is not None
    ]
    return Coverage(quantiles=len(inside), inside=sum(inside), share=sum(inside) / len(inside) if inside else None)
