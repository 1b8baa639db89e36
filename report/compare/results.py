"""A comparison as records, exactly as ``--json`` writes them; tables, the page and gates read them.

Times in ms, shares and errors as fractions. Null: not known, or not evaluated; docs/metrics.md defines every key.
"""

from typing import Any, Literal

import msgspec

from measure.thresholds import TOO_UNCERTAIN

SCHEMA = "kvtape-compare/1"
LEVELS: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}

Metric = Literal["ttft", "tpot", "itl", "e2e"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "itl", "e2e")


class Quantile(msgspec.Struct, frozen=True, kw_only=True):
    """Latency quantile of a label's curve, with its bootstrap interval."""

    value_ms: float | None = None
    """Null: the curve does not reach the quantile; see ``beyond_ms``."""
    beyond_ms: float | None = None
    """Longest latency, a lower bound of the quantile. Null: it has a value."""
    low_ms: float | None = None
    high_ms: float | None = None
    """Null beside a ``low_ms``: the interval is open above."""
    thin: bool = False
    """Less than one request is expected past this quantile: it is the sample's maximum."""


class Duration(msgspec.Struct, frozen=True, kw_only=True):
    """Latency metric of a label in a cohort."""

    n: int
    events: int
    failed: int
    censored: int
    censored_share: float
    unobserved: int
    units: int
    """Units that are resampled: sessions, together where they met in a queue."""
    effective_n: float = 0.0
    """Equivalent number of units of equal size."""
    p50: Quantile
    p90: Quantile
    p95: Quantile
    p99: Quantile


class QuantileError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative error of a latency quantile against the reference."""

    error: float | None = None
    signed_error: float | None = None
    """(other − truth) / truth; positive: other is slower. Null unless both sides reach the quantile."""
    reached: Literal["both", "one", "neither", "undecided"] = "both"
    """Sides whose curve reaches the quantile. one: an error without bound; undecided: a censored side may yet agree."""
    low: float | None = None
    high: float | None = None
    """Session-bootstrap interval of ``signed_error``, both sides drawn together."""
    repeat_error: float | None = None
    """Signed error against the geometric mean of the truth and its repeats. Null: the truth was captured once."""
    repeat_low: float | None = None
    repeat_high: float | None = None
    """Interval of ``repeat_error`` by Student's t over the captures."""
    captures: int = 1
    """Captures of the load that the error is against."""
    repeat_spread: float | None = None
    """Largest over smallest of the captures − 1: the A/A difference."""
    equivalence: float | None = None
    """Smallest margin around 0 that holds the error's interval, over captures, else over sessions. Null: none."""
    inside_band: bool | None = None
    """The truth's quantile lies inside the forecast's band. Null: the other is no ensemble, or undecided."""
    band: float | None = None
    """Half of the forecast's band over its middle. Null: the other is no ensemble, or its band is open above."""


class DurationError(msgspec.Struct, frozen=True, kw_only=True):
    """Latency error of a pair in a cohort. All null if not evaluated."""

    n_truth: int
    n_other: int
    evaluated: bool
    """False: a side has fewer waits than ``min_cell``."""
    verdict: str | None = None
    """Verdict on an ensemble: within band, off by x %, or too uncertain to say."""
    p50: QuantileError | None = None
    p90: QuantileError | None = None
    p95: QuantileError | None = None
    p99: QuantileError | None = None
    w1_ms: float | None = None
    w1_log: float | None = None
    sup: float | None = None
    joined: int = 0
    median_abs_error_ms: float | None = None
    median_abs_error: float | None = None
    bias_ms: float | None = None
    bias: float | None = None


class CachedAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """Cached tokens of a pair in a cohort, request by request."""

    joined: int
    n: int
    unreported_truth: int
    unreported_other: int
    evaluated: bool
    exact_share: float | None = None
    token_error: float | None = None
    prompt_token_error: float | None = None
    bias: float | None = None
    truth_hit_ratio: float | None = None
    other_hit_ratio: float | None = None
    same_prompt_share: float | None = None


class PairCohort(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and cached tokens of a label against its reference in a cohort."""

    cached: CachedAgreement
    ttft: DurationError
    tpot: DurationError
    itl: DurationError
    e2e: DurationError


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Share of reference TTFT quantiles (p50, p90, p99) inside the latency bands, over evaluated cohorts."""

    quantiles: int
    inside: int
    undecided: int = 0
    """Quantiles left out of these: the truth is only known to be larger than a value in the band."""
    share: float | None
    """inside / quantiles. Null: no quantile is evaluated."""
    p_value: float | None = None
    """Share of the capture and the members, together, that lie as far from their middle as the capture."""
    noise: dict[str, float] = {}
    """Noise by level: 98 % of the members, each compared as if it were the capture, have an |error| of at most this."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Label compared with its reference: latency and cached tokens."""

    truth: str
    kind: Literal["error", "contrast"]
    """contrast: the two ran under different conditions (shared or cold prompts, cache on or off), so the difference
    is an effect, not an error."""
    conditions: list[str] = []
    """Conditions of a contrast's label that differ from its reference."""
    joined: int
    unmatched_truth: int
    unmatched_other: int
    coverage: Coverage | None = None
    """Null: the label is no ensemble."""
    cohorts: dict[str, PairCohort]


class LabelCohort(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and prefix hits of a label in a cohort."""

    records: int
    sessions: int | None
    """Sessions with a record in the cohort. Null: the trace names none."""
    cached_reported: int
    hit_ratio: float | None
    """Σ cached / Σ prompt tokens over the records that report both. Null: none does."""
    ttft: Duration
    tpot: Duration
    itl: Duration
    e2e: Duration


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Trace or ensemble of a label: engine, block size, requests."""

    file: str
    digest: str
    source: str | None
    members: int | None = None
    """Number of ensemble members. Null: it is one trace."""
    records: int
    sessions: int | None
    """Null: the trace names none."""
    statuses: dict[str, int]
    engine: str | None
    model: str | None
    block_size: int | None
    cohorts: dict[str, LabelCohort]


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Gate on latency or cached tokens, with its result."""

    name: str
    """Short: ``TTFT p99``; a ``--gate`` is its own name."""
    expression: str
    value: float | bool | None
    """Null: not evaluated, which fails the gate, or not tested, which does not."""
    passed: bool
    uncertain: bool = False
    """Noise is larger than the limit: neither passed nor failed."""
    reason: str

    @property
    def state(self) -> str:
        if self.passed:
            return "not tested" if self.value is None else "passed"
        return TOO_UNCERTAIN if self.uncertain else "FAILED"


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a latency forecast ensemble of ``sim validate``."""

    model_digest: str
    members: int
    seed: int
    pacing: Literal["sessions", "recorded"]
    """sessions: a turn waits for the predicted end of the one before; recorded: every request at its recorded time."""
    cold_prompts: bool
    settings: dict[str, Any]
    utilization: float
    saturated: bool
    preempted: int
    fitted_captures: int = 0
    drift_log_sd: float = 0.0
    """Spread of the logarithm of the engine's speed between the fitted captures."""
    pace: float | None = None
    """Step time of the capture over the model's, the factor of a scaled forecast. Null: not scaled. Default gates
    do not evaluate scaled forecasts."""
    other_settings: list[str] = []
    """Settings that differ from those of the fit."""
    beyond_fit: list[str] = []
    """Extents of the load beyond those of the fitted captures."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``report compare`` or ``sim validate``."""

    schema: str
    headline: list[str]
    notes: list[str]
    seed: int
    bootstrap: int
    confidence: float
    min_cell: int
    repeats: list[str] = []
    """Labels of the same load measured again (A/A): errors are against the mean of these and their truth."""
    traces: dict[str, Provenance]
    pairs: dict[str, Pair]
    forecasts: dict[str, Forecast] = {}
    gates: list[GateResult] = []
    next_steps: list[str] = []
    """Likely causes of failed gates, and the command that tests each."""
