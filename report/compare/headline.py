"""The outcome in plain sentences: what was compared, how many requests, how far off."""

from collections.abc import Mapping

from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS, cohort_title
from measure.wording import factor, share, signed_percent
from report.compare.results import DurationError, Pair, Provenance

_NAMED = ("p50", "p90", "p99")


def headline(traces: Mapping[str, Provenance], pairs: Mapping[str, Pair], min_cell: int) -> list[str]:
    """One sentence a pair."""
    if not pairs:
        return [f"{_listed(list(traces))}: nothing to compare with."]
    return [_sentence(label, pairs[label], min_cell) for label in ordered_labels(traces, pairs)]


def ordered_labels(traces: Mapping[str, Provenance], pairs: Mapping[str, Pair]) -> list[str]:
    """Compared labels as they are spoken of: forecasts, repetitions, contrasts, each in the order given."""
    forecast = [label for label, pair in pairs.items() if pair.kind == "error" and traces[label].source == "sim"]
    repeated = [label for label, pair in pairs.items() if pair.kind == "error" and label not in forecast]
    contrast = [label for label, pair in pairs.items() if pair.kind == "contrast"]
    return [*forecast, *repeated, *contrast]


def telling_cohort(pair: Pair) -> str:
    """The cohort that says most: later turns, where a prefix cache shows, else all, if one is judged at all."""
    for name in (LATER_TURNS, ALL, FIRST_TURN):
        cohort = pair.cohorts.get(name)
        if cohort is not None and cohort.ttft.judged:
            return name
    return ALL


def _sentence(label: str, pair: Pair, min_cell: int) -> str:
    if not pair.joined:
        return f"{label} and {pair.truth} share no request: none is compared."
    name = telling_cohort(pair)
    ttft = pair.cohorts[name].ttft
    if not ttft.judged:
        return _too_few(label, pair, ttft, min_cell)
    if pair.kind == "contrast":
        return _contrast_sentence(label, pair, name)
    return (_error_sentence if ttft.verdict is None else _verdict_sentence)(label, pair, name)


def _error_sentence(label: str, pair: Pair, name: str) -> str:
    ttft = pair.cohorts[name].ttft
    errors = {level: found.error for level in _NAMED if (found := getattr(ttft, level)) is not None}
    within = f"within {share(max(errors.values()))} of" if errors else "not comparable by quantiles with"
    at = f" at {_listed(list(errors))}" if errors else ""
    agreement = _agreement(pair)
    return f"{label}: TTFT {within} {pair.truth}{at} ({_in_sentence(name)}, n = {ttft.n_truth:,}){agreement}."


def _verdict_sentence(label: str, pair: Pair, name: str) -> str:
    """Of a forecast with a band."""
    ttft = pair.cohorts[name].ttft
    errors = [
        f"{signed_percent(found.signed_error)} at {level}"
        for level in _NAMED
        if (found := getattr(ttft, level)) is not None
    ]
    held = f"{label} against {pair.truth}: TTFT {ttft.verdict}"
    return f"{held} ({_listed(errors)}; {_in_sentence(name)}, n = {ttft.n_truth:,}){_agreement(pair)}."


def _agreement(pair: Pair) -> str:
    cached = pair.cohorts[ALL].cached
    if cached.exact_share is None:
        return ""
    return f", and cached tokens are equal on {share(cached.exact_share)} of {cached.n:,} requests"


def _contrast_sentence(label: str, pair: Pair, name: str) -> str:
    ttft = pair.cohorts[name].ttft
    factors = [
        f"×{factor(1.0 + quantile.signed_error)} at {level}"
        for level, quantile in ((level, getattr(ttft, level)) for level in _NAMED)
        if quantile is not None
    ]
    return f"{label}, under other conditions than {pair.truth}: TTFT {_listed(factors)} ({_in_sentence(name)})."


def _too_few(label: str, pair: Pair, ttft: DurationError, min_cell: int) -> str:
    n = min(ttft.n_truth, ttft.n_other)
    return f"{label} against {pair.truth}: {n} requests with a TTFT; not judged under {min_cell}."


def _in_sentence(cohort: str) -> str:
    title = cohort_title(cohort)
    return title[0].lower() + title[1:]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "unknown"
