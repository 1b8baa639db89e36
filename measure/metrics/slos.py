"""SLOs on latency and throughput of a run, such as ``ttft.p99<=500ms`` or ``session.ttfat.p90<=20s``."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from measure.cohorts import cohort_rows, recorded_traits
from measure.metrics.client import lag_ms_of
from measure.metrics.requests import PER_GAP, REQUEST_METRICS, nan_if_unknown, success
from measure.metrics.results import WINDOWS, Goodput, SloResult, Workload
from measure.metrics.sessions import SESSION_METRICS, measure_sessions
from measure.metrics.statistics import quantile_of
from measure.metrics.workload import wall
from measure.runs import Run
from measure.thresholds import Threshold, Unit, parse_threshold
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import USAGE_ADVICE, InputError

_MOMENTS: Final[dict[str, Callable[[FloatArray], float]]] = {"mean": np.mean, "min": np.min, "max": np.max}
_NO_ROWS: Final[IntArray] = np.empty(0, np.int64)
RATES: Final = ("prompt_tps", "cached_tps", "uncached_tps", "completion_tps")
SHARES: Final = ("success", "goodput")
NUMBERS: Final = (*RATES, *SHARES, "requests_per_s")


def _plain(name: str) -> str:
    return name.removesuffix("_ms")


_COLUMNS: Final[dict[str, Callable[[Run], FloatArray]]] = {**REQUEST_METRICS, "lag_ms": lag_ms_of}
_OF_REQUEST: Final = {_plain(name): name for name in _COLUMNS}
_OF_SESSION: Final = {f"session.{_plain(name)}": name for name in SESSION_METRICS}
METRICS: Final = (*_OF_REQUEST, *_OF_SESSION, *RATES, "requests_per_s", *SHARES)
"""Metric names in SLOs: keys of ``per_request``, ``per_session`` and ``workload`` without ``_ms``."""


def parse_slos(texts: Sequence[str], labels: Sequence[str] = ()) -> tuple[Threshold, ...]:
    """Parse the SLOs of ``--slo``. Raises InputError for an SLO that no trace can be evaluated by."""
    return tuple(_parse(text, labels) for text in texts)


def slos_of(label: str, slos: Sequence[Threshold]) -> list[Threshold]:
    """Return the SLOs of a label, including SLOs without a label."""
    return [slo for slo in slos if slo.label in (None, label)]


def _parse(text: str, labels: Sequence[str]) -> Threshold:
    threshold = parse_threshold("--slo", text, metrics=METRICS, labels=labels)
    fault = _fault(threshold)
    if fault:
        raise InputError(f"--slo {text}: {fault}")
    return threshold


def _fault(threshold: Threshold) -> str | None:
    """Return the reason why no trace can be evaluated by the SLO; null: valid."""
    metric, key = threshold.metric, threshold.key
    if metric in RATES:
        if threshold.percentile is not None or (key is not None and key not in WINDOWS):
            return f"{metric}: expected it alone or one of {', '.join(f'{metric}.{window}' for window in WINDOWS)}"
    elif metric in (*SHARES, "requests_per_s"):
        if threshold.percentile is not None or key is not None:
            return f"{metric}: a single number; expected {metric} alone"
    elif (threshold.percentile is None) == (key is None) or (key is not None and key not in _MOMENTS):
        return f"{metric}: a sample; expected {metric}.pNN, {metric}.mean, {metric}.min or {metric}.max"
    if threshold.cohort is not None and metric not in _OF_REQUEST:
        return f"{metric}: has no cohorts; expected it without {threshold.cohort!r}"
    expected = unit_of(metric)
    if threshold.unit != expected and not (expected == "share" and threshold.unit == "number"):
        limits = {"ms": "a duration, such as 500ms", "share": "a percentage, such as 99%", "number": "a number"}
        return f"a limit in {threshold.unit}; expected {limits[expected]}"
    return None


def unit_of(metric: str) -> Unit:
    """Return the unit of a limit: ms for latencies, share, or number."""
    name = _OF_REQUEST.get(metric) or _OF_SESSION.get(metric) or metric
    return "ms" if name.endswith("_ms") else "share" if metric in SHARES or "hit_rate" in name else "number"


def check_slos(run: Run, slos: Sequence[Threshold], workload: Workload) -> list[SloResult]:
    """Evaluate latency and throughput SLOs. Raises InputError naming a metric that the trace lacks."""
    return [_evaluate(run, slo, workload) for slo in slos]


def _evaluate(run: Run, threshold: Threshold, workload: Workload) -> SloResult:
    result = _value(run, threshold, workload)
    if result is None:
        raise InputError(f"--slo {threshold.text}: {run.file} {_missing_metric(run, threshold)}")
    value, n = result
    return SloResult(
        slo=threshold.text,
        value=value,
        unit=unit_of(threshold.metric),
        met=threshold.holds(value),
        n=n,
    )


_NEEDED: Final = {
    ("lag", "ttft_from_schedule"): "scheduled_ms; expected a trace of loadgen or replay",
    ("ttft", "session.ttft", "session.ttfat"): "ttft_ms; expected streamed responses, or a limit on e2e",
    ("itl", "tpot", "interactivity_tps", "session.decode_tps"): "itl_ms; expected streamed "
    "responses of several tokens, or a limit on e2e",
    ("cached_tps", "uncached_tps", "session.hit_rate"): f"prompt_tokens and cached_tokens; {USAGE_ADVICE}",
    ("output_tokens", "e2e_per_token", "completion_tps"): f"output_tokens and e2e_ms; {USAGE_ADVICE}",
    ("input_tokens", "prompt_tps"): f"prompt_tokens and e2e_ms; {USAGE_ADVICE}",
    (
        "e2e",
        "session.latency",
        "requests_per_s",
    ): "arrival_ms and e2e_ms of completed requests; expected a trace with ends",
}
"""Record fields of each metric, and advice to record them."""


def refuse_without_streams(slos: Sequence[Threshold]) -> None:
    """Raise InputError for an SLO on a token latency, which needs streamed responses."""
    streamed = {name for names, advice in _NEEDED.items() if "streamed" in advice for name in names}
    for slo in slos:
        if slo.metric in streamed:
            raise InputError(f"--slo {slo.text}: needs streams; expected no --no-stream, or a limit on e2e")


def _missing_metric(run: Run, threshold: Threshold) -> str:
    """Return the missing fields of an SLO as text, with advice."""
    metric, cohort = threshold.metric, threshold.cohort
    if cohort is not None:
        cohorts = cohort_rows(recorded_traits(run))
        if cohort not in cohorts:
            return f"has no request in {cohort}; expected one of {', '.join(cohorts)}"
    if threshold.key == "steady_per_gpu":
        return f"has no {metric} a GPU; expected --gpus N"
    needed = next((advice for names, advice in _NEEDED.items() if metric in names), None)
    within = "" if cohort is None else f" in {cohort}"
    return f"has no {metric}{within}" + ("; expected a trace with it" if needed is None else f": it needs {needed}")


def _value(run: Run, threshold: Threshold, workload: Workload) -> tuple[float, int] | None:
    if threshold.metric in NUMBERS:
        value = _number_of(threshold, workload, success(run))
        return None if value is None else (value, len(run))
    values = _sample_of(run, threshold)
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    if threshold.percentile is not None:
        return quantile_of(values, threshold.percentile / 100.0) or 0.0, len(values)
    return float(_MOMENTS[threshold.key or "mean"](values)), len(values)


def _number_of(threshold: Threshold, workload: Workload, succeeded: float) -> float | None:
    """Return a metric of the complete run, in ``NUMBERS``: throughput or a share; null: not recorded."""
    metric = threshold.metric
    if metric in RATES:
        throughput: float | None = getattr(getattr(workload, metric), threshold.key or "overall")
        return throughput
    if metric == "goodput":
        return workload.goodput.share if workload.goodput else None
    return succeeded if metric == "success" else workload.requests_per_s


def _sample_of(run: Run, threshold: Threshold) -> FloatArray:
    """Return the sample of a threshold: latencies or token counts; NaN: unknown."""
    metric = threshold.metric
    if metric in _OF_SESSION:
        sessions = measure_sessions(run)
        values: FloatArray = getattr(sessions, _OF_SESSION[metric])[sessions.completed]
        return values
    if threshold.cohort is not None:
        run = run.select(cohort_rows(recorded_traits(run)).get(threshold.cohort, _NO_ROWS))
    return _COLUMNS[_OF_REQUEST[metric]](run)


def goodput(run: Run, slos: Sequence[Threshold]) -> Goodput | None:
    """Count completed requests that meet all SLOs on metrics per request; return their token throughput."""
    limits = [slo for slo in slos if slo.metric in _OF_REQUEST and _OF_REQUEST[slo.metric] not in PER_GAP]
    if not limits:
        return None
    good = run.ok.copy()
    for threshold in limits:
        values = _COLUMNS[_OF_REQUEST[threshold.metric]](run)
        is_met = threshold.meets(values)
        if threshold.cohort is not None:
            in_cohort = np.zeros(len(run), np.bool_)
            in_cohort[cohort_rows(recorded_traits(run)).get(threshold.cohort, _NO_ROWS)] = True
            is_met |= ~in_cohort
        good &= is_met
    wall_s = wall(run)[1]
    n = int(np.count_nonzero(good))
    tokens = float(np.nansum(nan_if_unknown(run.output_tokens)[good]))
    return Goodput(
        requests=n,
        share=n / len(run),
        requests_per_s=n / wall_s if wall_s else None,
        completion_tps=tokens / wall_s if wall_s else None,
    )
