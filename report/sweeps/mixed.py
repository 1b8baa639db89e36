"""Refusal of runs that are not of one sweep: another model, engine, workload or kind of run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from measure.metrics.results import TraceMetrics
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta

OF_WORKLOAD: Final = (
    *("api", "dataset", "prefix_count", "prefix_tokens", "prompt_tokens", "output_tokens", "turns", "min_turns"),
    *("max_turns", "think_s", "tool_latency_s", "first_turn_tokens", "subsequent_turn_tokens", "group_size"),
)
"""Keys of the header's ``workload`` that shape its requests; the others say how many there are, and when."""
LENGTH_FACTOR: Final = 2.0
"""Mean prompts this far apart are of different workloads, where headers do not tell."""
SAME_LABEL: Final = "a label is one configuration: give this run a label of its own, or --mixed"
SAME_WORKLOAD: Final = "give it as WORKLOAD/LABEL to keep it apart, or --mixed to compare all the same"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a run that the runs beside it must share, by field; null: not told."""

    name: str
    label: str
    of_workload: dict[str, Any]
    of_label: dict[str, Any]
    prompt_tokens: float | None
    """Mean prompt."""
    tells_workload: bool


def facts_of(name: str, label: str, meta: Meta, metrics: TraceMetrics) -> Facts:
    shape, engine, workload = _shape(meta), meta.engine, meta.workload
    prompts = metrics.per_request["input_tokens"]
    settings: dict[str, Any] = {} if engine is None else {"name": engine.name, "version": engine.version}
    if engine is not None:
        settings |= {"block_size": engine.block_size, "enable_prefix_caching": engine.enable_prefix_caching}
    return Facts(
        name=name,
        label=label,
        of_workload={"model": meta.model, "source": _kind(meta), **shape},
        of_label={
            **{f"engine.{name}": value for name, value in settings.items()},
            "workload.cold_prompts": bool(workload and workload.cold_prompts),
        },
        prompt_tokens=None if prompts is None else prompts.mean,
        tells_workload=bool(shape),
    )


def _kind(meta: Meta) -> str | None:
    return None if meta.source is None else "a simulation" if meta.source == "sim" else "a measurement"


def _shape(meta: Meta) -> dict[str, Any]:
    told = {} if meta.workload is None else meta.workload.extra
    return {f"workload.{name}": told[name] for name in OF_WORKLOAD if name in told}


def check_alike(runs: Sequence[Facts], *, mixed: bool) -> list[str]:
    """Hold the last run to the first of its workload and the first of its label.

    Returns the differences, one each field, if they are allowed; raises InputError naming the first one otherwise.
    """
    last = runs[-1]
    workload = last.label.rpartition("/")[0]
    beside = next(run for run in runs if run.label.rpartition("/")[0] == workload)
    alike = next(run for run in runs if run.label == last.label)
    found = [(one, SAME_WORKLOAD) for one in _differences(last, beside, last.of_workload, beside.of_workload)]
    found += [(one, SAME_LABEL) for one in _differences(last, alike, last.of_label, alike.of_label)]
    found += [(one, SAME_WORKLOAD) for one in _lengths(last, beside)]
    if found and not mixed:
        raise InputError("; ".join(found[0]))
    return [difference for difference, _ in found]


def _differences(run: Facts, other: Facts, mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [
        f"{run.name} differs from {other.name} in {name}: {value}, there {theirs[name]}"
        for name, value in mine.items()
        if None not in (value, theirs.get(name)) and value != theirs[name]
    ]


def _lengths(run: Facts, other: Facts) -> list[str]:
    mine, theirs = run.prompt_tokens, other.prompt_tokens
    if (run.tells_workload and other.tells_workload) or not mine or not theirs:
        return []
    if 1 / LENGTH_FACTOR <= mine / theirs <= LENGTH_FACTOR:
        return []
    return [
        f"{run.name} differs from {other.name} in its workload: mean prompt {mine:,.0f} tokens, there {theirs:,.0f}"
    ]
