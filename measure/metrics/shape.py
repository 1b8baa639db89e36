"""Shape of a workload on the axes of agentic traces: turns, prompts, outputs, tool or user tokens, pauses."""

import numpy as np

from measure.metrics.requests import known
from measure.metrics.results import Statistics
from measure.metrics.sessions import expected_tokens, session_order
from measure.metrics.statistics import statistics_of
from measure.runs import Run
from tracefile.records.arrays import FloatArray


def measure_shape(run: Run) -> dict[str, Statistics | None]:
    """Measure every session, its failed requests included; null where the trace tells none."""
    return {name: statistics_of(sample) for name, sample in shape_samples(run).items()}


def shape_samples(run: Run) -> dict[str, FloatArray]:
    """Return each axis's values, NaN where the trace tells none."""
    order = session_order(run)
    rows, first = order.rows, order.is_first
    last = np.append(first[1:], True)
    prompt, output = known(run.prompt_tokens)[rows], known(run.output_tokens)[rows]
    pause_ms = run.arrival_ms[rows] - np.append(np.nan, run.end_ms[rows][:-1])
    return {
        "turns": np.diff(np.append(order.starts, len(rows))).astype(np.float64),
        "first_prompt_tokens": prompt[first],
        "turn_output_tokens": output[~last],
        "appended_tokens": _from_zero((prompt - expected_tokens(run, order))[~first]),
        "pause_ms": _from_zero(pause_ms[~first]),
        "final_output_tokens": output[last],
    }


def _from_zero(values: FloatArray) -> FloatArray:
    """Return NaN for a prompt that was cut down, and for a request sent before the end of the one before."""
    return np.where(values >= 0, values, np.nan)
