"""SLOs on a run: thresholds in the one grammar, such as ``ttft.p99<=500ms`` or ``session.ttfat.p90<=20s``."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from measure.cohorts import cohort_rows, own_traits
from measure.metrics.client import lag_ms_of
from measure.metrics.requests import PER_GAP, REQUEST_METRICS, known, success
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
"""Names that an SLO may limit; longer ones stand in ``per_request``, ``per_session`` and ``workload``."""


def parse_slos(texts: Sequence[str], labels: Sequence[str] = ()) -> tuple[Threshold, ...]:
    """Read the SLOs of ``--slo``; raises InputError for one that no trace could be judged by."""
    return tuple(_parse(text, labels) for text in texts)


def slos_of(label: str, slos: Sequence[Threshold]) -> list[Threshold]:
    """Return the SLOs on a label: its own, and those without one."""
    return [slo for slo in slos if slo.label in (None, label)]


def _parse(text: str, labels: Sequence[str]) -> Threshold:
    threshold = parse_threshold("--slo", text, metrics=METRICS, labels=labels)
    fault = _fault(threshold)
    if fault:
        raise InputError(f"--slo {text}: {fault}")
    return threshold


def _fault(threshold: Threshold) -> str | None:
    """Return the reason why no trace could be judged by it; null: there is none."""
    metric, key = threshold.metric, threshold.key
    if metric in RATES:
        if threshold.percentile is not None or (key is not None and key not in WINDOWS):
            return f"{metric}: expected it alone or one of {', '.join(f'{metric}.{one}' for one in WINDOWS)}"
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
    """Return the unit of a metric's limit."""
    name = _OF_REQUEST.get(metric) or _OF_SESSION.get(metric) or metric
    return "ms" if name.endswith("_ms") else "share" if metric in SHARES or "hit_rate" in name else "number"


def check_slos(run: Run, slos: Sequence[Threshold], workload: Workload) -> list[SloResult]:
    """Judge each SLO; raises InputError naming a metric that the trace lacks."""
    return [_judge(run, slo, workload) for slo in slos]


def _judge(run: Run, threshold: Threshold, workload: Workload) -> SloResult:
    found = _value(run, threshold, workload)
    if found is None:
        raise InputError(f"--slo {threshold.text}: {run.file} {_lack(run, threshold)}")
    value, n = found
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
"""Fields that each metric is made of, and the way to a trace with them."""


def refuse_without_streams(slos: Sequence[Threshold]) -> None:
    """Raise InputError for an SLO on a time that only streamed responses have, where none is to be streamed."""
    streamed = {name for names, told in _NEEDED.items() if "streamed" in told for name in names}
    for slo in slos:
        if slo.metric in streamed:
            raise InputError(f"--slo {slo.text}: needs streams; expected no --no-stream, or a limit on e2e")


def _lack(run: Run, threshold: Threshold) -> str:
    """Return what an SLO needs and the trace lacks, and what to do."""
    metric, cohort = threshold.metric, threshold.cohort
    if cohort is not None:
        there = cohort_rows(own_traits(run))
        if cohort not in there:
            return f"has no request in {cohort}; expected one of {', '.join(there)}"
    if threshold.key == "steady_per_gpu":
        return f"has no {metric} a GPU; expected --gpus N"
    needed = next((told for names, told in _NEEDED.items() if metric in names), None)
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
    """Return a number that is one of the whole run's, of ``NUMBERS``; null: the trace does not say."""
    metric = threshold.metric
    if metric in RATES:
        found: float | None = getattr(getattr(workload, metric), threshold.key or "overall")
        return found
    if metric == "goodput":
        return workload.goodput.share if workload.goodput else None
    return succeeded if metric == "success" else workload.requests_per_s


def _sample_of(run: Run, threshold: Threshold) -> FloatArray:
    """Return the values that a threshold limits, NaN where they are not known."""
    metric = threshold.metric
    if metric in _OF_SESSION:
        sessions = measure_sessions(run)
        values: FloatArray = getattr(sessions, _OF_SESSION[metric])[sessions.completed]
        return values
    if threshold.cohort is not None:
        run = run.select(cohort_rows(own_traits(run)).get(threshold.cohort, _NO_ROWS))
    return _COLUMNS[_OF_REQUEST[metric]](run)


def goodput(run: Run, slos: Sequence[Threshold]) -> Goodput | None:
    """Count completed requests that keep the limit of every SLO on a metric with a value a request."""
    limits = [slo for slo in slos if slo.metric in _OF_REQUEST and _OF_REQUEST[slo.metric] not in PER_GAP]
    if not limits:
        return None
    good = run.ok.copy()
    for threshold in limits:
        values = _COLUMNS[_OF_REQUEST[threshold.metric]](run)
        kept = threshold.holds_each(values)
        if threshold.cohort is not None:
            judged = np.zeros(len(run), np.bool_)
            judged[cohort_rows(own_traits(run)).get(threshold.cohort, _NO_ROWS)] = True
            kept |= ~judged
        good &= kept
    wall_s = wall(run)[1]
    n = int(np.count_nonzero(good))
    tokens = float(np.nansum(known(run.output_tokens)[good]))
    return Goodput(
        requests=n,
        share=n / len(run),
        requests_per_s=n / wall_s if wall_s else None,
        completion_tps=tokens / wall_s if wall_s else None,
    )
