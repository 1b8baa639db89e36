"""Cells of a comparison: a metric of a label in a cohort, the pair of two such, ensembles, provenance.

An ensemble is many members of one load, the same requests in the same rows. Its quantiles and curves are the middle
members' by order statistic, so that the curve is the quantiles' inverse and both may be infinite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from measure.cohorts import ALL
from measure.quantiles import ROUNDING, quantile, quantile_place
from measure.resampling import FEWEST_UNITS, effective_units, interval, resample
from measure.runs import STATUSES, UNKNOWN, Run
from measure.survival import CENSORED, EVENT, FAILED, Waits, incidence, make_waits, quantiles, survival_at
from measure.waits import distance, logrank_p
from measure.wording import listed, share
from report.compare.pairing import Join
from report.compare.results import (
    LEVELS,
    METRICS,
    CachedAgreement,
    Coverage,
    Disagreement,
    Duration,
    DurationError,
    LabelCohort,
    Metric,
    PairCohort,
    Provenance,
    Quantile,
    QuantileError,
)
from tracefile.records.arrays import FloatArray, IntArray

MIN_CELL: Final = 30
"""Waits that each side of a cell needs before anything is said about their difference."""

LEVEL_SHARES: Final[FloatArray] = np.array(list(LEVELS.values()))
_BULK_POINTS: Final = 240
_TAIL_POINTS: Final = 120


@dataclass(frozen=True, slots=True)
class Curve:
    """A survival curve for drawing: share still waiting just after each time, with its band (NaN: none)."""

    time_ms: FloatArray
    survival: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True, slots=True)
class Cell:
    """A label's sample and what is derived from it; of an ensemble, all ``members`` as one sample (0: a trace)."""

    waits: Waits
    sessions: int
    effective_n: float
    """Independent units, of sessions that met in no queue, that tell as much."""
    values_ms: FloatArray
    """Quantiles at LEVELS; infinite past the curve's end."""
    low_ms: FloatArray
    high_ms: FloatArray
    """Interval of each quantile: over resampled sessions, of an ensemble over its members. NaN: none."""
    drawn_ms: FloatArray | None
    """Quantiles (draws, LEVELS) of resampled sessions, of an ensemble of one member after another. Null: too few
    sessions to resample, or a metric without intervals."""
    curve: Curve
    members: int = 0
    members_ms: FloatArray | None = None
    """Of an ensemble: each member's quantiles at LEVELS, shape (members, LEVELS); NaN: it has no wait."""

    @property
    def size(self) -> int:
        """Number of waits, on average over the members."""
        return self.count(EVENT) + self.count(FAILED) + self.count(CENSORED)

    def count(self, end: int) -> int:
        return round(self.waits.count(end) / max(1, self.members))


def measure(waits: Waits, session_of_row: IntArray, weights: npt.NDArray[np.uint16] | None) -> Cell:
    """Curve, quantiles and bootstrap draws of one sample; ``weights`` None: no intervals."""
    if not len(waits):
        return empty_cell(waits)
    units = session_of_row[waits.row]
    sessions, effective_n = len(np.unique(units)), effective_units(units)
    share = incidence(waits)
    values_ms = quantiles(waits, share, LEVEL_SHARES)
    points = drawn_points(waits)
    drawn_ms = None
    low = high = np.full(len(points), np.nan)
    low_ms = high_ms = np.full(len(LEVEL_SHARES), np.nan)
    if weights is not None and effective_n >= FEWEST_UNITS and len(weights):
        replicates = resample(waits, session_of_row, weights, LEVEL_SHARES, points)
        drawn_ms = replicates.quantiles_ms
        low, high = interval(replicates.survival)
        low_ms, high_ms = interval(drawn_ms)
        places = np.searchsorted(share, LEVEL_SHARES - ROUNDING)
        above = [effective_units(units[place + 1 :]) for place in places]
        high_ms = np.where(np.array(above) < FEWEST_UNITS, np.inf, high_ms)
    curve = Curve(waits.time_ms[points], 1.0 - share[points], low, high)
    return Cell(waits, sessions, effective_n, values_ms, low_ms, high_ms, drawn_ms, curve)


def empty_cell(waits: Waits, members: int = 0) -> Cell:
    nothing, unknown = np.empty(0), np.full(len(LEVEL_SHARES), np.nan)
    curve = Curve(nothing, nothing, nothing, nothing)
    return Cell(waits, 0, 0.0, unknown, unknown, unknown, None, curve, members)


def describe(cell: Cell) -> Duration:
    n, censored = cell.size, cell.count(CENSORED)
    found = {
        name: Quantile(
            value_ms=_number(cell.values_ms[at]),
            beyond_ms=cell.waits.last_ms if np.isinf(cell.values_ms[at]) else None,
            low_ms=_number(cell.low_ms[at]),
            high_ms=_number(cell.high_ms[at]),
            thin=n * (1.0 - level) < 1.0 - 1e-9,
        )
        for at, (name, level) in enumerate(LEVELS.items())
    }
    return Duration(
        n=n,
        events=cell.count(EVENT),
        failed=cell.count(FAILED),
        censored=censored,
        censored_share=censored / n if n else 0.0,
        unobserved=round(cell.waits.unobserved / max(1, cell.members)),
        sessions=cell.sessions,
        effective_n=round(cell.effective_n, 1),
        **found,
    )


def judge(
    truth: Cell, other: Cell, per_request: tuple[FloatArray, FloatArray] | None, yardstick: DurationError | None
) -> DurationError:
    """Judge a pair of cells; ``per_request``: the truth's and the other's value of each joined request."""
    n_truth, n_other = truth.size, other.size
    if min(n_truth, n_other) < MIN_CELL:
        return DurationError(n_truth=n_truth, n_other=n_other, judged=False)
    found = {name: _quantile_error(truth, other, at) for at, name in enumerate(LEVELS)}
    apart = distance(truth.waits, other.waits)
    measured = DurationError(
        n_truth=n_truth,
        n_other=n_other,
        judged=True,
        w1_ms=apart.w1_ms,
        w1_log=apart.w1_log,
        sup=apart.sup,
        horizon_ms=apart.horizon_ms,
        logrank_p=None if other.members else logrank_p(truth.waits, other.waits),
    )
    beside = {name: _beside(error, yardstick, name) for name, error in found.items()}
    measured = msgspec.structs.replace(measured, **beside, verdict=verdict(beside) if other.members else None)
    return _with_requests(measured, *per_request) if per_request is not None else measured


def joined_rows(join: Join, truth_cohort: IntArray, truth: Run) -> tuple[IntArray, IntArray]:
    inside = np.zeros(len(truth), dtype=np.bool_)
    inside[truth_cohort] = True
    kept = inside[join.truth_rows]
    return join.truth_rows[kept], join.other_rows[kept]


def _quantile_error(truth: Cell, other: Cell, at: int) -> QuantileError | None:
    t, o = truth.values_ms[at], other.values_ms[at]
    if np.isnan(t) or np.isnan(o) or t <= 0:
        return None
    inside = _inside_band(t, truth, other, at) if other.members else None
    if not (np.isfinite(t) and np.isfinite(o)):
        return QuantileError(reached=_reached(t, o, truth, other), inside_band=inside)
    low = high = np.full(1, np.nan)
    known = all(cell.members or np.isfinite(cell.high_ms[at]) for cell in (truth, other))
    if known and truth.drawn_ms is not None and other.drawn_ms is not None:
        drawn_t, drawn_o = truth.drawn_ms[:, at], other.drawn_ms[:, at]
        kept = np.isfinite(drawn_t) & ~np.isnan(drawn_o) & (drawn_t > 0)
        low, high = interval(((drawn_o[kept] - drawn_t[kept]) / drawn_t[kept])[:, None])
    signed = float((o - t) / t)
    return QuantileError(
        error=abs(signed),
        signed_error=signed,
        low=_number(low[0]),
        high=_number(high[0]),
        inside_band=inside,
    )


def _reached(t: float, o: float, truth: Cell, other: Cell) -> Literal["one", "neither", "undecided"]:
    """Say which sides reach a quantile that is infinite on one side or both; a censored curve is a lower bound."""
    if np.isinf(t) and np.isinf(o):
        return "neither"
    bound_ms = (truth if np.isinf(t) else other).waits.known_until_ms
    return "one" if min(t, o) < bound_ms else "undecided"


def _inside_band(t: float, truth: Cell, other: Cell, at: int) -> bool | None:
    """Say if the truth's quantile lies in the band; null: it is larger than a value inside, by how much is unknown."""
    low, high = other.low_ms[at], other.high_ms[at]
    if np.isfinite(t) or np.isinf(low):
        return bool(low <= t <= high)
    least_ms = truth.waits.known_until_ms
    if high < least_ms:
        return False
    return True if np.isinf(high) and low <= least_ms else None


def _beside(error: QuantileError | None, yardstick: DurationError | None, name: str) -> QuantileError | None:
    measured: QuantileError | None = getattr(yardstick, name) if yardstick is not None else None
    if error is None or measured is None or error.signed_error is None or measured.signed_error is None:
        return error
    against_mean = (1.0 + error.signed_error) / (1.0 + measured.signed_error / 2) - 1.0
    return msgspec.structs.replace(error, repeat_error=against_mean)


def _with_requests(cell: DurationError, truth_ms: FloatArray, other_ms: FloatArray) -> DurationError:
    """Add errors per joined request; under MIN_CELL of them, only their number."""
    both = ~np.isnan(truth_ms) & ~np.isnan(other_ms) & (truth_ms > 0)
    t, o = truth_ms[both], other_ms[both]
    values: dict[str, float] = {}
    if len(t) >= MIN_CELL:
        values = {
            "median_abs_error_ms": float(np.median(np.abs(o - t))),
            "median_abs_error": float(np.median(np.abs(o - t) / t)),
            "bias_ms": float(np.mean(o - t)),
            "bias": float((o - t).sum() / t.sum()),
        }
    return msgspec.structs.replace(cell, joined=len(t), **values)


def drawn_points(waits: Waits) -> IntArray:
    """Return positions of sorted waits to draw: evenly by rank, and denser towards the tail."""
    n = len(waits)
    bulk = np.linspace(0, n - 1, _BULK_POINTS)
    tail = n - np.geomspace(1, n, _TAIL_POINTS)
    points = np.unique(np.concatenate([bulk, tail]).astype(np.int64))
    # A step ends at the last wait that ties, or the curve would be drawn too high there.
    last_of_tie = np.searchsorted(waits.time_ms, waits.time_ms[points], side="right") - 1
    return np.unique(last_of_tie)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


JUDGED_LEVELS: Final = ("p50", "p90", "p99")
WITHIN_BAND: Final = "within band"


def verdict(errors: Mapping[str, QuantileError | None]) -> str:
    """Return the verdict on p50, p90 and p99: within band, or the largest error outside it."""
    found = {level: error for level in JUDGED_LEVELS if (error := errors[level]) is not None}
    if not found:
        return "not comparable"
    outside = {level: error for level, error in found.items() if error.inside_band is False}
    if outside:
        one_sided = [level for level, error in outside.items() if error.error is None]
        if one_sided:
            return f"off, {listed(one_sided)} on one side"
        return f"off by {share(max(gated_error(error) for error in outside.values()))}"
    undecided = [level for level, error in found.items() if error.inside_band is None]
    return WITHIN_BAND if not undecided else f"{WITHIN_BAND}, {listed(undecided)} undecided"


def gated_error(error: QuantileError) -> float:
    """Return the |error|, against the mean of the captures if the truth was repeated; infinite without bound."""
    signed = error.signed_error if error.repeat_error is None else error.repeat_error
    return float("inf") if signed is None else abs(signed)


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


def coverage(cohorts: Mapping[str, PairCohort]) -> Coverage:
    """Count the truth's TTFT quantiles that lie inside the bands, over every counted cohort."""
    found = [
        error.inside_band
        for cohort in counted_cohorts(cohorts).values()
        for level in JUDGED_LEVELS
        if (error := getattr(cohort.ttft, level)) is not None
    ]
    inside = [held for held in found if held is not None]
    return Coverage(
        quantiles=len(inside),
        inside=sum(inside),
        undecided=len(found) - len(inside),
        share=sum(inside) / len(inside) if inside else None,
    )


GATE_LEVEL: Final = 0.98
"""Share of members that keep to the noise of a gate: a right model seldom fails one."""


def with_members(found: Coverage, cells: Sequence[tuple[PairCohort, Cell, Cell]]) -> Coverage:
    """Add what the members tell, each taken for the capture: the p of the capture, and the noise by level.

    ``cells``: counted cohorts with the truth's and the ensemble's cell. Of a right model, capture and members are
    exchangeable, correlated quantiles and drift included, so that p is under 5 % for 5 captures of 100.
    """
    columns, noise = [], {}
    for level in JUDGED_LEVELS:
        at, errors = list(LEVELS).index(level), []
        for pair, truth, other in cells:
            error: QuantileError | None = getattr(pair.ttft, level)
            if other.members_ms is None or error is None or error.inside_band is None:
                continue
            columns.append(np.concatenate([truth.values_ms[at : at + 1], other.members_ms[:, at]]))
            if np.isfinite(other.values_ms[at]) and not np.isnan(other.members_ms[:, at]).any():
                errors.append(np.abs(other.values_ms[at] / other.members_ms[:, at] - 1.0))
        if errors:
            noise[level] = quantile(np.sort(np.sort(errors, axis=0)[quantile_place(0.5, len(errors))]), GATE_LEVEL)
    if not columns:
        return found
    return msgspec.structs.replace(found, noise=noise, p_value=_exchangeable_p(np.stack(columns, axis=1)))


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
    members: Sequence[Waits], session_of_row: IntArray, weights: npt.NDArray[np.uint16] | None
) -> Cell:
    """Middle and band over the members' samples of one metric in one cohort; draws resample each member's sessions."""
    pooled = _pooled(members)
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
    return np.asarray(np.quantile(values, 0.5, axis=0, method="inverted_cdf"))


Cells = Mapping[tuple[str, str, Metric], Cell]


def provenance(run: Run, cohorts: Mapping[str, IntArray], cells: Cells, members: int) -> Provenance:
    """Describe a run; ``cohorts``: its rows by cohort; ``members``: members that its cells pool, 0 for a trace."""
    engine = run.meta.engine
    named = {session for session in run.sessions if session is not None}
    counted = np.bincount(run.status, minlength=len(STATUSES))
    return Provenance(
        file=run.file,
        digest=run.digest,
        source=run.meta.source,
        members=members or None,
        records=len(run),
        sessions=len(named) or None,
        statuses={status: int(count) for status, count in zip(STATUSES, counted, strict=True) if count},
        engine=" ".join(filter(None, [engine.name, engine.version])) or None if engine else None,
        model=run.meta.model,
        block_size=(engine.block_size if engine else None) or run.meta.block_size,
        epoch_unix_ns=run.meta.epoch_unix_ns,
        workload=_workload(run),
        cohorts={name: _label_cohort(run, name, rows, cells) for name, rows in cohorts.items()},
    )


def _workload(run: Run) -> str | None:
    workload = run.meta.workload
    if workload is None:
        return None
    said = [
        workload.pattern,
        "closed loop" if workload.extra.get("closed_loop") else None,
        f"seed {workload.seed}" if workload.seed is not None else None,
        "cold prompts" if workload.cold_prompts else None,
        f"speedup {workload.speedup:g}" if workload.speedup not in (None, 1.0) else None,
    ]
    return ", ".join(word for word in said if word) or None


def _label_cohort(run: Run, name: str, rows: IntArray, cells: Cells) -> LabelCohort:
    return LabelCohort(
        records=len(rows),
        cached_reported=int(np.count_nonzero(run.cached_tokens[rows] != UNKNOWN)),
        hit_ratio=hit_ratio(run.prompt_tokens[rows], run.cached_tokens[rows]),
        **{metric: describe(cells[run.label, name, metric]) for metric in METRICS},
    )


WORST_SHOWN = 20


def cached_agreement(
    truth: Run, other: Run, truth_rows: IntArray, other_rows: IntArray, min_cell: int
) -> CachedAgreement:
    """Compare the cached tokens of joined requests (row i of both arrays: the same one). Null is no miss: left out."""
    theirs, ours = truth.cached_tokens[truth_rows], other.cached_tokens[other_rows]
    reported = (theirs != UNKNOWN) & (ours != UNKNOWN)
    t, o = theirs[reported], ours[reported]
    counts = CachedAgreement(
        joined=len(truth_rows),
        n=len(t),
        unreported_truth=int(np.count_nonzero(theirs == UNKNOWN)),
        unreported_other=int(np.count_nonzero(ours == UNKNOWN)),
        judged=len(t) >= min_cell,
        worst=_worst(truth, truth_rows[reported], t, o),
    )
    if not counts.judged:
        return counts
    prompts_t, prompts_o = truth.prompt_tokens[truth_rows][reported], other.prompt_tokens[other_rows][reported]
    off = float(np.abs(o - t).sum())
    return msgspec.structs.replace(
        counts,
        exact_share=float(np.mean(o == t)),
        token_error=_ratio(off, float(t.sum())),
        prompt_token_error=_ratio(off, float(prompts_t[prompts_t != UNKNOWN].sum())),
        bias=_ratio(float((o - t).sum()), float(t.sum())),
        truth_hit_ratio=hit_ratio(prompts_t, t),
        other_hit_ratio=hit_ratio(prompts_o, o),
        same_prompt_share=float(np.mean(prompts_t == prompts_o)),
    )


def hit_ratio(prompt_tokens: IntArray, cached_tokens: IntArray) -> float | None:
    """Σ cached / Σ prompt over the requests that report both; null if none does."""
    known = (prompt_tokens != UNKNOWN) & (cached_tokens != UNKNOWN)
    return _ratio(float(cached_tokens[known].sum()), float(prompt_tokens[known].sum()))


def _worst(truth: Run, rows: IntArray, t: IntArray, o: IntArray) -> list[Disagreement]:
    off = np.abs(o - t)
    order = np.argsort(-off, kind="stable")[:WORST_SHOWN]
    return [
        Disagreement(
            request_id=truth.request_ids[rows[at]],
            turn=int(truth.turn[rows[at]]) if truth.turn[rows[at]] != UNKNOWN else None,
            truth_tokens=int(t[at]),
            other_tokens=int(o[at]),
        )
        for at in order
        if off[at]
    ]


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
