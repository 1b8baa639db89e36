"""What a cell says of a forecast: inside its own band, no worse than the engine against itself, or how far off."""

from collections.abc import Iterable, Mapping
from typing import Final

from report.results import Coverage, PairCohort, QuantileError
from report.wording import share

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


def coverage(cohorts: Iterable[PairCohort]) -> Coverage:
    """Over every judged cohort's TTFT."""
    inside = [
        error.inside_band
        for cohort in cohorts
        if cohort.ttft.judged
        for level in JUDGED_LEVELS
        if (error := getattr(cohort.ttft, level)) is not None
    ]
    return Coverage(quantiles=len(inside), inside=sum(inside), share=sum(inside) / len(inside) if inside else None)
