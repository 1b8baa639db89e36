"""Forecasts as ensembles: many members of one load; their median is the forecast and their spread its band.

Each member is a run of the same requests in the same rows. Quantiles and curves are the middle members' by order
statistic, so that the curve is the quantiles' inverse and both may be infinite.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from measure.resampling import MIN_SESSIONS, interval, resample
from measure.runs import Run
from measure.survival import Waits, incidence, make_waits, quantiles, survival_at
from report.compare.cells import LEVEL_SHARES, Cell, Curve, drawn_points, empty_cell
from tracefile.records.arrays import FloatArray, IntArray

_MIDDLE = 0.5


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
    members: Sequence[Waits], session_of_row: IntArray, weights: npt.NDArray[np.uint16] | None
) -> Cell:
    """Middle and band over the members' samples of one metric in one cohort.

    The draws for an error's interval take one member after another and resample its sessions as the truth's are, so
    that they hold both what the model leaves open and what few sessions do.
    """
    pooled = _pooled(members)
    if not len(pooled):
        return empty_cell(pooled, len(members))
    present = [member for member in members if len(member)]
    shares = [incidence(member) for member in present]
    times_ms = pooled.time_ms[drawn_points(pooled)]
    survival = np.array([survival_at(one, share, times_ms) for one, share in zip(present, shares, strict=True)])
    of_members = np.array([quantiles(one, share, LEVEL_SHARES) for one, share in zip(present, shares, strict=True)])
    low, high = interval(survival)
    low_ms, high_ms = interval(of_members)
    sessions = len(np.unique(session_of_row[pooled.row]))
    drawn_ms = None
    if weights is not None and sessions >= MIN_SESSIONS and len(weights):
        drawn_ms = _draws(members, session_of_row, weights)
    curve = Curve(times_ms, _middle(survival), low, high)
    return Cell(pooled, sessions, _middle(of_members), low_ms, high_ms, drawn_ms, curve, len(members))


def _pooled(members: Sequence[Waits]) -> Waits:
    return make_waits(
        np.concatenate([member.time_ms for member in members]),
        np.concatenate([member.end for member in members]),
        np.concatenate([member.row for member in members]),
        sum(member.unobserved for member in members),
    )


def _draws(members: Sequence[Waits], session_of_row: IntArray, weights: npt.NDArray[np.uint16]) -> FloatArray:
    drawn_ms = np.full((len(weights), len(LEVEL_SHARES)), np.nan)
    nowhere = np.empty(0, dtype=np.int64)
    for number, member in enumerate(members[: len(weights)]):
        if len(member):
            own = weights[number :: len(members)]
            drawn_ms[number :: len(members)] = resample(member, session_of_row, own, LEVEL_SHARES, nowhere).quantiles_ms
    return drawn_ms


def _middle(values: FloatArray) -> FloatArray:
    return np.asarray(np.quantile(values, _MIDDLE, axis=0, method="inverted_cdf"))
