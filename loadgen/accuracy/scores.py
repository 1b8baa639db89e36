"""Scores of an evaluation as its summary tells them; free of lm-eval, whose import takes seconds."""

from collections.abc import Mapping
from typing import Any

import msgspec

from measure.table import table_lines


class Score(msgspec.Struct, frozen=True):
    """Value of one metric of one task or group."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    """Null: lm-eval has none for it."""


class Accuracy(msgspec.Struct, frozen=True):
    """Scores of a run, as lm-eval computed them."""

    lm_eval: str
    """Its version."""
    results: str | None
    """File with lm-eval's own results. Null: nothing could be scored."""
    documents_left_out: dict[str, int]
    """By task: documents without an output for each of their requests."""
    scores: list[Score]


def scores_of(results: Mapping[str, Any]) -> list[Score]:
    """Return every metric of lm-eval's results, whose names are ``metric,filter``."""
    found = []
    for task, values in results["results"].items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if metric.endswith("_stderr") or not kind or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            known = float(stderr) if isinstance(stderr, int | float) else None
            found.append(Score(task, metric, kind, float(value), known))
    return found


def accuracy_lines(accuracy: Accuracy) -> list[str]:
    """Return the lines of a summary: lm-eval's file, what it lacks, and a table of the scores."""
    lines = [f"{f'lm-eval {accuracy.lm_eval}':20}{accuracy.results or 'nothing was scored'}"]
    lines += [
        f"{'left out':20}{count} documents of {task}: not every output came"
        for task, count in accuracy.documents_left_out.items()
    ]
    rows = [
        [one.task, one.metric, one.filter, f"{one.value:.4f}", "-" if one.stderr is None else f"{one.stderr:.4f}"]
        for one in accuracy.scores
    ]
    return [*lines, *(table_lines(["task", "metric", "filter", "value", "stderr"], rows, "<<<") if rows else [])]
