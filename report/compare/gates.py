"""Gates: limits that a comparison must keep, such as ``predicted.turns2+.ttft.p50.error<=10%``, for CI.

A threshold without a key limits the label's own quantile, with a key a figure of the pair. An unevaluated cell fails.
Where an error's noise is larger than its limit, no error within the noise passes or fails: it is too uncertain to say.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, inf
from typing import Final

from measure.cohorts import ALL, cohort_order
from measure.number_format import listed, share
from measure.quantiles import quantile
from measure.thresholds import (
    BELOW_SATURATION,
    IN_SATURATION,
    TOO_UNCERTAIN,
    Threshold,
    is_uncertain,
    parse_threshold,
)
from report.compare.cells import MIN_CELL, gated_error
from report.compare.ensembles import counted_cohorts
from report.compare.results import (
    LEVELS,
    METRICS,
    CachedAgreement,
    Comparison,
    Duration,
    DurationError,
    Forecast,
    GateResult,
    Pair,
    Provenance,
    Quantile,
    QuantileError,
)
from tracefile.commandline.exit_codes import verdict_code
from tracefile.records.errors import USAGE_ADVICE, InputError

_QUANTILE_KEYS: Final = QuantileError.__struct_fields__
_METRIC_KEYS: Final = tuple(name for name in DurationError.__struct_fields__ if name not in (*LEVELS, "verdict"))
_CACHED_KEYS: Final = CachedAgreement.__struct_fields__


@dataclass(frozen=True, slots=True)
class Gate:
    """Parsed limit on latency or cached tokens, and the labels that it applies to."""

    threshold: Threshold
    labels: tuple[str, ...]


def parse_gate(text: str, labels: Sequence[str], paired: Sequence[str]) -> Gate:
    """Parse a ``--gate`` on latency or cached tokens. ``paired``: labels with a reference. Raises InputError."""
    limit = parse_threshold("--gate", text, metrics=("cached", *METRICS), labels=labels)
    level = None if limit.percentile is None else f"p{limit.percentile:g}"
    if level is not None and (level not in LEVELS or limit.metric == "cached"):
        raise InputError(f"--gate {text}: no quantile {level} of {limit.metric}; expected one of {', '.join(LEVELS)}")
    keys = _QUANTILE_KEYS if level else _CACHED_KEYS if limit.metric == "cached" else _METRIC_KEYS
    if limit.key not in keys and (limit.key is not None or level is None):
        raise InputError(
            f"--gate {text}: no key {limit.key!r} of {level or limit.metric}; expected one of {', '.join(keys)}"
        )
    in_ms = limit.key is None or limit.key.endswith("_ms")
    if in_ms != (limit.unit == "ms"):
        raise InputError(f"--gate {text}: expected {'a limit in ms or s' if in_ms else 'a number or a percentage'}")
    allowed = labels if limit.key is None else paired
    if limit.label is not None and limit.label not in allowed:
        raise InputError(f"--gate {text}: {limit.label} has no truth; expected one of {', '.join(allowed)}")
    return Gate(limit, tuple(allowed) if limit.label is None else (limit.label,))


def check_gate(gate: Gate, traces: Mapping[str, Provenance], pairs: Mapping[str, Pair]) -> Iterator[GateResult]:
    threshold = gate.threshold
    for label in gate.labels:
        expression = threshold.text if threshold.label is not None else f"{label}.{threshold.text}"
        cohorts = (traces if threshold.key is None else pairs)[label].cohorts
        cohort = cohorts.get(threshold.cohort or ALL)
        if cohort is None:
            present = ", ".join(cohort_order(set(cohorts)))
            yield _refused(expression, expression, f"no requests in cohort {threshold.cohort}; there are {present}")
            continue
        value = _value(threshold, getattr(cohort, threshold.metric))
        if value is None:
            missing = "no interval; capture the load again, and pass it as --repeat"
            reason = missing if threshold.key == "equivalence" else "too few requests, or the value does not exist"
            yield _refused(expression, expression, f"not evaluated: {reason}")
            continue
        noise = _noise(threshold, getattr(cohort, threshold.metric))
        uncertain = noise is not None and is_uncertain(value, threshold.limit, noise)
        passed = threshold.holds(value) and not uncertain
        reason = f"{value:.4g} {'keeps' if passed else 'breaks'} it"
        if uncertain:
            reason = f"{share(value)}, noise {share(noise or 0.0)}"
        yield GateResult(
            name=expression, expression=expression, value=value, passed=passed, uncertain=uncertain, reason=reason
        )


_ERROR_KEYS: Final = ("error", "signed_error", "repeat_error")


def _noise(threshold: Threshold, cell: Duration | DurationError | CachedAgreement) -> float | None:
    """Return half of an error's interval or of a latency band; None: none, or no limit on an error."""
    error = getattr(cell, f"p{threshold.percentile:g}") if threshold.percentile is not None else None
    if not isinstance(error, QuantileError) or threshold.key not in _ERROR_KEYS:
        return None
    low, high = (error.repeat_low, error.repeat_high) if threshold.key == "repeat_error" else (error.low, error.high)
    interval = None if low is None or high is None else (high - low) / 2.0
    return max((width for width in (error.band, interval) if width is not None), default=None)


def _value(threshold: Threshold, cell: Duration | DurationError | CachedAgreement) -> float | bool | None:
    if isinstance(cell, Duration) and cell.n < MIN_CELL:
        return None
    holder = cell if threshold.percentile is None else getattr(cell, f"p{threshold.percentile:g}")
    if isinstance(holder, Quantile):
        return holder.value_ms
    value = getattr(holder, threshold.key or "", None)
    return value if isinstance(value, int | float) else None


MIN_EXACT_SHARE: Final = 0.99
"""Share of requests whose cached tokens must be exact, where no request is preempted."""
MIN_P: Final = 0.05
"""Smallest ``p_value`` of the capture among the forecast's members: 95 of 100 captures of a right model have more."""


def standard_gates(result: Comparison) -> Iterator[GateResult]:
    """Evaluate the default gates of each ensemble: cached tokens, TTFT, bands."""
    for label, forecast in result.forecasts.items():
        if forecast.pace is not None:  # scaled with the capture itself
            continue
        pair = result.pairs[label]
        yield from _cached(label, pair, forecast, result.min_cell)
        yield from _quantiles(label, pair, forecast)
        yield _coverage(label, pair, forecast)


def _cached(label: str, pair: Pair, forecast: Forecast, min_cell: int) -> Iterator[GateResult]:
    cached, name = pair.cohorts[ALL].cached, _named(label, "cached tokens")
    expression = f"{label}: cached tokens exact >= {share(MIN_EXACT_SHARE)}"
    if not cached.n:
        reason = f"no request of {pair.truth} reports them; {USAGE_ADVICE}"
        yield GateResult(name=name, expression=expression, value=None, passed=True, reason=reason)
    elif cached.exact_share is None:
        yield _refused(name, expression, f"not evaluated: {cached.n} requests report them; {min_cell} are needed")
    elif forecast.preempted:
        reason = f"not tested: {forecast.preempted:,} requests are preempted"
        yield GateResult(name=name, expression=expression, value=cached.exact_share, passed=True, reason=reason)
    else:
        passed = cached.exact_share >= MIN_EXACT_SHARE
        yield _gate_result(name, expression, cached.exact_share, passed, f"{cached.n:,} requests")


def _named(label: str, name: str) -> str:
    return name if label == "predicted" else f"{label}: {name}"


def _quantiles(label: str, pair: Pair, forecast: Forecast) -> Iterator[GateResult]:
    for level, limit in (IN_SATURATION if forecast.saturated else BELOW_SATURATION).items():
        expression = f"{label}: TTFT {level} within {share(limit)}, middle cohort"
        errors = {
            cohort_name: gated_error(error)
            for cohort_name, cohort in counted_cohorts(pair.cohorts).items()
            if (error := getattr(cohort.ttft, level)) is not None and error.reached in ("both", "one")
        }
        name = _named(label, f"TTFT {level}")
        if not errors:
            yield _refused(name, expression, "not evaluated: no cohort has enough requests")
            continue
        middle = quantile(sorted(errors.values()), 0.5)
        if middle == inf:
            yield _refused(name, expression, "one side alone reaches it, in most cohorts")
            continue
        noise = pair.coverage.noise.get(level, 0.0) if pair.coverage is not None else 0.0
        worst = max(errors, key=errors.__getitem__)
        reason = f"{len(errors)} cohorts, worst {worst} {share(errors[worst])}" if len(errors) > 1 else worst
        reason += f", noise {share(noise)}" if noise > limit else ""
        reason += ", in saturation" if forecast.saturated else ""
        uncertain = is_uncertain(middle, limit, noise)
        yield _gate_result(name, expression, middle, middle <= limit and not uncertain, reason, uncertain=uncertain)


def _coverage(label: str, pair: Pair, forecast: Forecast) -> GateResult:
    expression = f"{label}: bands hold the capture, p >= {share(MIN_P)}"
    name, coverage = _named(label, "bands"), pair.coverage
    if coverage is None or coverage.p_value is None:
        return _refused(name, expression, "not evaluated: no cohort has enough requests")
    if (forecast.members + 1) * MIN_P < 1.0:
        reason = f"not tested: {forecast.members} members are too few; {round(1.0 / MIN_P) - 1} are needed"
        return GateResult(name=name, expression=expression, value=None, passed=True, reason=reason)
    inside = f"{coverage.inside} of {coverage.quantiles} quantiles inside"
    return _gate_result(name, expression, coverage.p_value, coverage.p_value >= MIN_P, inside)


def _gate_result(
    name: str, expression: str, value: float, passed: bool, of: str, *, uncertain: bool = False
) -> GateResult:
    reason = f"{share(value)}, {of}"
    return GateResult(name=name, expression=expression, value=value, passed=passed, uncertain=uncertain, reason=reason)


def _refused(name: str, expression: str, reason: str) -> GateResult:
    return GateResult(name=name, expression=expression, value=None, passed=False, reason=reason)


def failures(gates: Sequence[GateResult], state: str = "FAILED") -> list[str]:
    """Return the gates of a state by name, with latency errors or shares."""
    return [
        gate.name
        if isinstance(gate.value, bool) or gate.name == gate.expression
        else f"{gate.name} ({share(gate.value)})"
        for gate in gates
        if gate.state == state
    ]


def exit_code(gates: Iterable[GateResult]) -> int:
    """Return 1 if a gate failed, ``UNCERTAIN`` if too uncertain, else 0."""
    states = {gate.state for gate in gates}
    return verdict_code(failed="FAILED" in states, uncertain=TOO_UNCERTAIN in states)


_FEWEST_COHORTS: Final = 3
ENOUGH_CAPTURES: Final = 3
"""Captures of one load that give the uncertainty of their mean."""


def advice(result: Comparison) -> list[str]:
    """Return next steps for failed latency or cached token gates, likeliest cause first; empty: all passed."""
    steps: list[str] = []
    for label, forecast in result.forecasts.items():
        mark = f"{label}:"
        gates = [gate for gate in result.gates if gate.expression.startswith(mark)]
        failed = [gate for gate in gates if gate.state == "FAILED"]
        if failed:
            steps += _of_forecast(result, label, forecast, failed)
        elif any(gate.uncertain for gate in gates):
            steps += _of_noise(result, forecast)
    return list(dict.fromkeys(steps))


def _of_forecast(result: Comparison, label: str, forecast: Forecast, failed: Sequence[GateResult]) -> Iterator[str]:
    pair, kinds = result.pairs[label], {gate.name.removeprefix(f"{label}: ") for gate in failed}
    unevaluated = [gate.name for gate in failed if gate.value is None]
    if unevaluated:
        yield f"{listed(unevaluated)}: not evaluated; capture a longer load: {result.min_cell} requests per cohort"
    if "cached tokens" in kinds:
        yield f"cached tokens differ: sim audit {result.traces[pair.truth].file} shows the cause, request by request"
    missed = [level for level in BELOW_SATURATION if f"TTFT {level}" in kinds]
    if missed and "cached tokens" not in kinds:
        yield from _of_latency(result, label, forecast, missed)
    if ("bands" in kinds or missed) and forecast.fitted_captures < 2:
        yield f"one capture does not measure the drift of the engine's speed: fit {_calibrations(result)}"


def _of_noise(result: Comparison, forecast: Forecast) -> Iterator[str]:
    """Yield steps that narrow latency bands: captures bound the drift, their length the parameters."""
    if forecast.beyond_fit:
        yield f"the load is beyond the fitted range: {listed(forecast.beyond_fit)}; fit a capture of such a load too"
    drift = expm1(forecast.drift_log_sd)
    if drift > BELOW_SATURATION["p50"]:
        yield f"the engine's pace differs by {share(drift)} between the fitted captures: capture on an idle machine"
    again = "" if result.repeats else ", or pass captures of this load again as --repeat"
    yield f"the bands are wider than the gates' limits: fit {_calibrations(result)}{again}"


def _calibrations(result: Comparison) -> str:
    fitted = max(forecast.fitted_captures for forecast in result.forecasts.values())
    more = f"{ENOUGH_CAPTURES} calibrations and more" if fitted < ENOUGH_CAPTURES else "longer calibrations, or more"
    first = next(iter(result.traces.values()))
    return f"{more}, captured before, between and after the loads (loadgen --pattern calibration --for {first.file})"


def _of_latency(result: Comparison, label: str, forecast: Forecast, missed: Sequence[str]) -> Iterator[str]:
    pair = result.pairs[label]
    repeats = [repeat for name in result.repeats if (repeat := result.pairs[name]).truth == pair.truth]
    if forecast.other_settings:
        yield f"the engine is not the fitted one: {listed(forecast.other_settings)}; fit captures of this engine"
    if forecast.beyond_fit:
        yield f"the load is beyond the fitted range: {listed(forecast.beyond_fit)}; fit a capture of such a load too"
    if len(cells := counted_cohorts(pair.cohorts)) >= _FEWEST_COHORTS:
        errors = [getattr(cell.ttft, missed[0]) for cell in cells.values()]
        slower = [error.signed_error < 0.0 for error in errors if error is not None and error.signed_error is not None]
        if slower and (all(slower) or not any(slower)):
            way = "slower" if slower[0] else "faster"
            yield (
                f"every cohort was {way} than forecast: the engine, its machine or their background load changed since "
                "the fit; capture and fit again"
            )
    if len(repeats) + 1 < ENOUGH_CAPTURES:
        yield (
            "a noisy machine shows the same: capture this load again, three times in all, and pass it as "
            "--repeat each time; errors are then against the mean of the captures"
        )
