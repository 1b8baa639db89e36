"""Headline and notes of a comparison: latency and cached tokens in sentences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS
from measure.metrics.client import measure_client
from measure.metrics.health import check_lag
from measure.number_format import factor, listed, share, signed_percent
from measure.resampling import CONFIDENCE, FEWEST_UNITS
from measure.runs import Run
from report.compare.results import Duration, Forecast, Pair, Provenance, QuantileError
from tracefile.records.errors import USAGE_ADVICE

_NAMED = ("p50", "p90", "p99")


def headline(traces: Mapping[str, Provenance], pairs: Mapping[str, Pair], min_cell: int, draws: int) -> list[str]:
    """Return a sentence on TTFT and cached tokens of each pair; ``draws``: of the bootstrap, 0: no intervals."""
    if not pairs:
        return [f"{listed(list(traces))}: nothing to compare with."]
    return [_sentence(label, traces, pairs[label], min_cell, draws) for label in ordered_labels(traces, pairs)]


def doubts(forecast: Forecast) -> Iterator[str]:
    """Yield warnings about an engine or load (batch, tokens) beyond the fitted captures."""
    if forecast.other_settings:
        yield f"the model is of another engine ({listed(forecast.other_settings)}); its step times may not hold here."
    if forecast.beyond_fit:
        yield f"the load is beyond the fitted captures ({listed(forecast.beyond_fit)}); the band is wider for it."


def ordered_labels(traces: Mapping[str, Provenance], pairs: Mapping[str, Pair]) -> list[str]:
    forecast = [label for label, pair in pairs.items() if pair.kind == "error" and traces[label].source == "sim"]
    repeated = [label for label, pair in pairs.items() if pair.kind == "error" and label not in forecast]
    contrast = [label for label, pair in pairs.items() if pair.kind == "contrast"]
    return [*forecast, *repeated, *contrast]


def telling_cohort(pair: Pair) -> str:
    """Return the cohort to show first: later turns, where the prefix cache shows, else all requests."""
    for name in (LATER_TURNS, ALL, FIRST_TURN):
        cohort = pair.cohorts.get(name)
        if cohort is not None and cohort.ttft.evaluated:
            return name
    return ALL


def _sentence(label: str, traces: Mapping[str, Provenance], pair: Pair, min_cell: int, draws: int) -> str:
    if not pair.joined:
        return f"{label} and {pair.truth} share no request: none is compared."
    name = telling_cohort(pair)
    ttft = pair.cohorts[name].ttft
    named = f"{label} against {pair.truth}"
    if not ttft.evaluated:
        n = min(ttft.n_truth, ttft.n_other)
        return f"{named}: {n} requests with a TTFT; not evaluated under {min_cell}."
    errors = {level: error for level in _NAMED if (error := getattr(ttft, level)) is not None}
    level = next((level for level, error in errors.items() if error.signed_error is not None), None)
    if level is None:
        return f"{named}: TTFT of {_WAITING[name]} is not comparable by quantiles{_agreement(pair)}."
    error, where = errors.pop(level), "at the median" if level == "p50" else f"at {level}"
    doubt = _doubt(error, [traces[side].cohorts[name].ttft for side in (pair.truth, label)], draws)
    if pair.kind == "contrast":
        return f"{named}: {listed(pair.conditions)}, {_WAITING[name]} wait {_effect(error)} {where} ({doubt})."
    text = f"TTFT of {_WAITING[name]} is {_error(error, traces[label])} {where} ({doubt})"
    tail = f"; verdict on p50, p90 and p99: {ttft.verdict}" if ttft.verdict is not None else _tails(errors)
    return f"{named}: {text}{_beside_repeats(error)}{tail}{_agreement(pair)}."


_WAITING: Final = {ALL: "all requests", FIRST_TURN: "first turns", LATER_TURNS: "turns 2+"}


def _error(error: QuantileError, other: Provenance) -> str:
    signed = error.signed_error or 0.0
    if round(signed, 3) == 0.0:
        return "the same"
    predicted = other.source == "sim"
    way = ("too high" if predicted else "higher") if signed > 0 else ("too low" if predicted else "lower")
    return f"{share(abs(signed))} {way}"


def _effect(error: QuantileError) -> str:
    """Return the change of TTFT; from 2 times on as a factor."""
    signed = error.signed_error or 0.0
    if signed >= 1.0:
        return f"{factor(1.0 + signed)} times as long for the first token"
    return f"{share(abs(signed))} {'longer' if signed >= 0 else 'less'} for the first token"


def _doubt(error: QuantileError, sides: Sequence[Duration], draws: int) -> str:
    """Return the interval of a latency difference, or the reason for none."""
    if error.low is not None and error.high is not None:
        if error.low >= 1.0 and error.signed_error is not None and error.signed_error >= 1.0:
            ends = f"{factor(1.0 + error.low)} to {factor(1.0 + error.high)}"
        else:
            ends = f"{signed_percent(error.low)} to {signed_percent(error.high)}"
        return f"{CONFIDENCE:.0%} interval {ends}".replace("%", " %", 1)
    if not draws:
        return "no interval: --bootstrap 0"
    few = min(side.effective_n for side in sides) < FEWEST_UNITS
    return f"no interval: too few independent {'sessions' if few else 'waits above it'}"


def _beside_repeats(error: QuantileError) -> str:
    if error.repeat_spread is None or error.signed_error is None:
        return ""
    than = "less" if abs(error.signed_error) <= error.repeat_spread else "more"
    return f", {than} than {error.captures} captures of this load differ ({share(error.repeat_spread)})"


def _tails(quantiles: Mapping[str, QuantileError]) -> str:
    errors = {level: error.error for level, error in quantiles.items() if error.error is not None}
    unreached = [level for level, error in quantiles.items() if error.reached == "one"]
    within = f"; within {share(max(errors.values()))} at {listed(list(errors))}" if errors else ""
    return within + (f"; {listed(unreached)} on one side alone" if unreached else "")


def _agreement(pair: Pair) -> str:
    cached = pair.cohorts[ALL].cached
    if cached.exact_share in (None, 1.0):
        return ""
    return f"; cached tokens are exact on {share(cached.exact_share)} of {cached.n:,} requests"


def error_text(error: QuantileError) -> str:
    if error.signed_error is not None:
        return signed_percent(error.signed_error)
    return {"one": "one side alone", "neither": "both beyond"}.get(error.reached, "undecided")


_FEW_SESSIONS = 20
"""Under so many sessions a percentile bootstrap is known to give intervals that are too narrow."""


def notes_on(runs: Mapping[str, Run], traces: Mapping[str, Provenance], pairs: Mapping[str, Pair]) -> list[str]:
    notes = [note for run in runs.values() for note in _of_run(run)]
    for label, pair in pairs.items():
        notes += _of_pair(label, pair)
    few = {label: units for label, trace in traces.items() if (units := _units(trace)) < _FEW_SESSIONS}
    if few:
        named = ", ".join(f"{label} {units}" for label, units in few.items())
        notes.append(
            f"Few sessions that did not wait for one another ({named}): intervals are likely too narrow, and missing "
            f"under {FEWEST_UNITS}."
        )
    return notes


def _of_run(run: Run) -> list[str]:
    notes = [f"{run.label}: {_without_folder(warning, run.file)}." for warning in run.warnings]
    twice = len(run) - len(set(run.request_ids))
    if twice:
        notes.append(f"{run.label}: {twice:,} records repeat a request_id; only the first of each is joined.")
    if unstreamed := len(run) - int(run.streamed.sum()):
        notes.append(f"{run.label}: {unstreamed:,} of {len(run):,} responses were not streamed: no TTFT, no ITL.")
    if run.meta.source == "sim" and "validation" in run.meta.extra:
        notes.append(f"{run.label}: {run.meta.extra['validation']}.")
    lag = check_lag(measure_client(run))
    if lag.verdict == "bad":
        notes.append(f"{run.label}: the client was late: {lag.figure}; repeat it ({lag.where}).")
    return notes


def _of_pair(label: str, pair: Pair) -> list[str]:
    notes = []
    if pair.unmatched_truth or pair.unmatched_other:
        notes.append(
            f"{label} and {pair.truth} share {pair.joined:,} requests; {pair.unmatched_truth:,} only in "
            f"{pair.truth}, {pair.unmatched_other:,} only in {label}."
        )
    cached = pair.cohorts["all"].cached
    if cached.joined and not cached.n:
        notes.append(f"{label} and {pair.truth}: no request reports cached tokens on both sides; {USAGE_ADVICE}.")
    elif cached.joined > cached.n:
        notes.append(f"{label} and {pair.truth}: {cached.joined - cached.n:,} requests lack cached tokens on a side.")
    if cached.same_prompt_share is not None and cached.same_prompt_share < 1.0:
        different = round((1.0 - cached.same_prompt_share) * cached.n)
        notes.append(f"{label} and {pair.truth}: prompts of {different:,} joined requests differ in length.")
    if pair.kind == "error" and cached.exact_share is not None and cached.exact_share < 0.99:
        notes.append(f"{label}: cached tokens disagree with {pair.truth}; read its latencies with that in mind.")
    return notes


def _units(trace: Provenance) -> int:
    return trace.cohorts["all"].ttft.units


def _without_folder(warning: str, file: str) -> str:
    before, separator, after = warning.partition(file)
    return f"{file}{after}" if separator and " " not in before else warning


def order_notes(*groups: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(note for group in groups for note in group))
