"""A sweep's outcome in sentences."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from measure.wording import duration, factor, listed, share
from report.sweeps.results import Contrast, Line, Ratio, Sweep, Workload

SAME: Final = 0.02
"""Values this close are told as equal."""


def headlines(sweep: Sweep) -> list[str]:
    """Return the verdict of the one workload, or a summary of several."""
    first = sweep.workloads[0]
    if len(sweep.workloads) == 1 and not first.name:
        return first.verdict
    return list(_summary(sweep)) or [f"{first.name}: {sentence}" for sentence in first.verdict]


def _summary(sweep: Sweep) -> Iterator[str]:
    """Yield a sentence for each pair of labels that several workloads have."""
    pairs: dict[tuple[str, str], list[Contrast]] = {}
    for found in sweep.workloads:
        for pair in found.contrasts:
            pairs.setdefault((short(pair.label), short(pair.against)), []).append(pair)
    for (label, against), contrasts in pairs.items():
        ratios = [point.ratios for pair in contrasts for point in pair.points]
        waits, tokens = (_range(ratios, name) for name in ("ttft_p90_ms", "throughput_tps"))
        if len(contrasts) > 1 and waits and tokens:
            yield (
                f"With {label}, TTFT p90 is {share(waits[0])} to {share(waits[1])} of {against}'s, and output tokens "
                f"per second are {factor(tokens[0])} to {factor(tokens[1])} times as many, over {len(ratios)} loads of "
                f"{len(contrasts)} workloads."
            )


def _range(ratios: Sequence[dict[str, Ratio | None]], name: str) -> tuple[float, float] | None:
    known = [one.value for each in ratios if (one := each[name]) is not None]
    return (min(known), max(known)) if known else None


def verdict(found: Workload) -> list[str]:
    """Return sentences on each label against the first, of a single label on its most tokens; and on the SLOs."""
    said = [sentence for pair in found.contrasts for sentence in _contrast(found, pair)]
    said = said or [_alone(found, found.lines[0])]
    slos = _slos(found)
    if len(found.contrasts) < 2 and slos:
        said[0] += f"; {slos}"
    elif slos:
        said.append(slos)
    return [f"{sentence}." for sentence in said]


def short(label: str) -> str:
    """Return a label without its workload."""
    return label.rpartition("/")[2]


def _alone(found: Workload, line: Line) -> str:
    told = [(tokens, point) for point in line.points if (tokens := point.median("throughput_tps")) is not None]
    if not told:
        return f"{short(line.label)}: no run tells its output tokens"
    most, best = max(told, key=lambda one: one[0])
    pace = best.median("interactivity_tps")
    users = "" if pace is None else f", {factor(pace)} of them to each user"
    at = found.load_text(best.load)
    return f"{short(line.label)} gives at most {factor(most)} output tokens per second, at {at}{users}"


def _contrast(found: Workload, pair: Contrast) -> Iterator[str]:
    """Compare at equal interactivity where a limit kept the load even, then at the largest load of both."""
    points = min(len(line.points) for line in found.lines if line.label in (pair.label, pair.against))
    if found.load == "parallel" and pair.throughput is not None and points > 1:
        pace = factor(pair.interactivity_tps or 0.0)
        yield f"At {pace} tok/s per user {_gives(pair, pair.throughput)}{_interval(pair.throughput)}"
    if pair.points:
        yield _at_load(found, pair)
    elif pair.throughput is None:
        yield f"{short(pair.label)} and {short(pair.against)} share no load: they are not compared"


def _at_load(found: Workload, pair: Contrast) -> str:
    """Compare at the largest load of both: throughput first if the load let it differ, else the wait."""
    last = pair.points[-1]
    waits, tokens = last.ratios["ttft_p90_ms"], last.ratios["throughput_tps"]
    said = [] if waits is None else [_wait(found, pair, waits)]
    if tokens is not None:
        at = 0 if found.load == "parallel" else len(said)
        said.insert(at, _gives(pair, tokens) + (_interval(tokens) if at == 0 else ""))
    told = ", and ".join(said) or f"{short(pair.label)} and {short(pair.against)} tell neither tokens nor a TTFT"
    return f"At {found.load_text(last.load)} {told}"


def _gives(pair: Contrast, ratio: Ratio) -> str:
    label, against = short(pair.label), short(pair.against)
    if abs(ratio.value - 1.0) < SAME:
        return f"{label} gives as many output tokens per second as {against}"
    return f"{label} gives {factor(ratio.value)} times {against}'s output tokens per second"


def _wait(found: Workload, pair: Contrast, ratio: Ratio) -> str:
    """Compare TTFT p90 at the last load."""
    label, against = short(pair.label), short(pair.against)
    loads = {pair.label: pair.points[-1].own_load, pair.against: pair.points[-1].load}
    lines = {line.label: line for line in found.lines}
    points = [next(point for point in lines[name].points if point.load == load) for name, load in loads.items()]
    values = " against ".join(duration(point.median("ttft_p90_ms") or 0.0) for point in points)
    if abs(ratio.value - 1.0) < SAME:
        return f"{label}'s TTFT p90 is that of {against}: {values}{_interval(ratio)}"
    if ratio.value > 1.0:
        return f"{label}'s TTFT p90 is {factor(ratio.value)} times as long as {against}'s: {values}{_interval(ratio)}"
    low, high = (None if end is None else 1 / end for end in (ratio.high, ratio.low))
    inverse = msgspec.structs.replace(ratio, value=1 / ratio.value, low=low, high=high)
    return f"{label}'s TTFT p90 is {factor(inverse.value)} times shorter than {against}'s: {values}{_interval(inverse)}"


def _interval(ratio: Ratio) -> str:
    if not ratio.span:
        return " (no interval: repeat the runs)"
    runs = " of one run each" if ratio.by == "sessions" else ""
    return f" ({ratio.span} by {ratio.units:,} {ratio.by}{runs})"


def _slos(found: Workload) -> str:
    """Return the largest loads within the SLOs; empty if none was asked."""
    asked: dict[str, list[Line]] = {}
    for line in found.lines:
        if line.judged:
            asked.setdefault(listed([slo.slo for slo in line.points[0].slos]), []).append(line)
    return "; ".join(f"{slos}: met {', '.join(_met(found, line) for line in lines)}" for slos, lines in asked.items())


def _met(found: Workload, line: Line) -> str:
    label = short(line.label)
    if line.largest_load is None:
        later = next((point for point in line.points if point.meets), None)
        other = "" if later is None else f" from the smallest on, though at {found.load_text(later.load)}"
        return f"with {label} at no load{other}"
    if line.largest_load == line.points[-1].load:
        return f"with {label} at every load"
    return f"with {label} at no load above {found.load_text(line.largest_load)}"
