"""Ensembles in a comparison: the middle of the members, their band, if the truth may be a member.

An ensemble is many members of one load, the same requests in the same rows. Its quantiles and curves are the middle
members' by order statistic, so that the curve is the quantiles' inverse and both may be infinite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from measure.cohorts import ALL
from measure.quantiles import quantile, quantile_index
from measure.resampling import FEWEST_UNITS, effective_units, interval, resample
from measure.runs import Run
from measure.survival import LatencySample, incidence, pooled_sample, quantiles, survival_at
from report.compare.cells import (
    JUDGED_LEVELS,
    LEVEL_SHARES,
    Cell,
    drawn_points,
    empty_cell,
    mean_of_captures,
    shrinkage,
)
from report.compare.results import (
    LEVELS,
    Coverage,
    PairCohort,
    QuantileError,
)
from report.pages.figures import Curve
from tracefile.records.arrays import FloatArray, IntArray


def counted_cohorts(cohorts: Mapping[str, PairCohort]) -> dict[str, PairCohort]:
    """Return the judged cohorts, each set of requests once: a cohort of all requests is ``all``.

    Those by load are left out: a wrong model moves requests between them, and so compares other requests.
    """
    everything = cohorts[ALL].ttft.n_truth if ALL in cohorts else None
    return {
        name: cohort
        for name, cohort in cohorts.items()
        if cohort.ttft.judged and not name.startswith("load:") and (name == ALL or cohort.ttft.n_truth != everything)
    }


def coverage_text(cohorts: Mapping[str, PairCohort]) -> Coverage:
    """Count the truth's TTFT quantiles that lie inside the bands, over every counted cohort."""
    inside_bands = [
        error.inside_band
        for cohort in counted_cohorts(cohorts).values()
        for level in JUDGED_LEVELS
        if (error := getattr(cohort.ttft, level)) is not None
    ]
    inside = [held for held in inside_bands if held is not None]
    return Coverage(
        quantiles=len(inside),
        inside=sum(inside),
        undecided=len(inside_bands) - len(inside),
        share=sum(inside) / len(inside) if inside else None,
    )


GATE_LEVEL: Final = 0.98
"""Share of members that keep to the noise of a gate: a right model seldom fails one."""


def with_members(result: Coverage, cells: Sequence[tuple[PairCohort, Cell, Cell]], fitted: int = 0) -> Coverage:
    """Add what the members tell, each taken for the capture: the p of the capture, and the noise by level.

    ``cells``: counted cohorts with the truth's and the ensemble's cell. Of a right model, capture and members are
    exchangeable, correlated quantiles and drift included, so that p is under 5 % for 5 captures of 100. The mean of
    several captures stands for the capture; members then come as much nearer to their middle as it does, with a model
    of ``fitted`` captures.
    """
    columns, noise = [], {}
    for level in JUDGED_LEVELS:
        at, errors = list(LEVELS).index(level), []
        for pair, truth, other in cells:
            error: QuantileError | None = getattr(pair.ttft, level)
            if other.members_ms is None or error is None or error.inside_band is None:
                continue
            middle_ms, nearer = other.values_ms[at], shrinkage(error.captures, fitted)
            members_ms = other.members_ms[:, at]
            if nearer < 1.0 and np.isfinite(middle_ms):
                members_ms = middle_ms * (members_ms / middle_ms) ** nearer
            columns.append(np.concatenate([[mean_of_captures(truth.values_ms[at], error)], members_ms]))
            if np.isfinite(middle_ms) and not np.isnan(members_ms).any():
                errors.append(np.abs(middle_ms / members_ms - 1.0))
        if errors:
            noise[level] = quantile(np.sort(np.sort(errors, axis=0)[quantile_index(0.5, len(errors))]), GATE_LEVEL)
    if not columns:
        return result
    return msgspec.structs.replace(result, noise=noise, p_value=_exchangeable_p(np.stack(columns, axis=1)))


def _exchangeable_p(values: FloatArray) -> float:
    """Return the share of rows as far from the middle as row 0: mean |ln value − its median| over mean of these."""
    logs = np.log(np.maximum(values, 1e-9))
    finite = np.where(np.isfinite(logs), logs, np.nan)
    beyond = np.nan_to_num(np.nanmax(finite, axis=0) * 2 - np.nanmin(finite, axis=0), nan=0.0) + 1.0
    logs = np.where(np.isposinf(logs), beyond, np.where(np.isnan(logs), np.nanmedian(finite, axis=0), logs))
    apart = np.abs(logs - np.median(logs, axis=0))
    scores = (apart / np.maximum(apart.mean(axis=0), 1e-12)).mean(axis=1)
    return float(np.mean(scores >= scores[0] - 1e-9))


def middle_run(members: Sequence[Run]) -> Run:
    """Return an ensemble's run: the median of its members' values, request by request."""

    def middle(values: list[FloatArray]) -> FloatArray:
        order = np.sort(np.where(np.isnan(values), np.inf, values), axis=0)[(len(values) - 1) // 2]
        return np.where(np.isinf(order), np.nan, order)

    def middle_count(counts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.asarray(np.sort(counts, axis=0)[(len(counts) - 1) // 2])

    return replace(
        members[0],
        arrival_ms=middle([member.arrival_ms for member in members]),
        ttft_ms=middle([member.ttft_ms for member in members]),
        e2e_ms=middle([member.e2e_ms for member in members]),
        tpot_ms=middle([member.tpot_ms for member in members]),
        status=middle_count([member.status for member in members]),
        cached_tokens=middle_count([member.cached_tokens for member in members]),
        concurrency=middle_count([member.concurrency for member in members]),
    )


def measure_ensemble(
    members: Sequence[LatencySample], session_of_row: IntArray, weights: npt.NDArray[np.uint16] | None
) -> Cell:
    """Middle and band over the members' samples of one metric in one cohort; draws resample each member's sessions."""
    pooled = pooled_sample(members)
    if not len(pooled):
        return empty_cell(pooled, len(members))
    present = [member for member in members if len(member)]
    shares = [incidence(member) for member in present]
    times_ms = pooled.time_ms[drawn_points(pooled)]
    survival = np.array([survival_at(one, share, times_ms) for one, share in zip(present, shares, strict=True)])
    of_members = np.array([quantiles(one, share, LEVEL_SHARES) for one, share in zip(present, shares, strict=True)])
    members_ms = np.full((len(members), len(LEVEL_SHARES)), np.nan)
    members_ms[[len(member) > 0 for member in members]] = of_members
    low, high = interval(survival)
    low_ms, high_ms = interval(of_members)
    units = session_of_row[pooled.row]
    sessions, effective_n = len(np.unique(units)), effective_units(units)
    drawn_ms = None
    if weights is not None and effective_n >= FEWEST_UNITS and len(weights):
        drawn_ms = _draws(members, session_of_row, weights)
    curve = Curve(times_ms, _middle(survival), low, high)
    return Cell(
        pooled, sessions, effective_n, _middle(of_members), low_ms, high_ms, drawn_ms, curve, len(members), members_ms
    )


def _draws(members: Sequence[LatencySample], session_of_row: IntArray, weights: npt.NDArray[np.uint16]) -> FloatArray:
    drawn_ms = np.full((len(weights), len(LEVEL_SHARES)), np.nan)
    nowhere = np.empty(0, dtype=np.int64)
    for number, member in enumerate(members[: len(weights)]):
        if len(member):
            kept = weights[number :: len(members)]
            replicates = resample(member, session_of_row, kept, LEVEL_SHARES, nowhere)
            drawn_ms[number :: len(members)] = replicates.quantiles_ms
    return drawn_ms


def _middle(values: FloatArray) -> FloatArray:
    return np.asarray(np.quantile(values, 0.5, axis=0, method="inverted_cdf"))
