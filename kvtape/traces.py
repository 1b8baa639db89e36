"""Traces as arrays or data frames, and their metrics: latency, throughput, prefix hits."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from measure.metrics import trace as metrics
from measure.metrics.requests import nan_if_unknown
from measure.metrics.results import TraceMetrics
from measure.metrics.slos import parse_slos
from measure.runs import STATUSES, Run
from tracefile.records.errors import InputError

FrameLibrary = Literal["pandas", "polars"]
TIMES = ("arrival_ms", "scheduled_ms", "ttft_ms", "e2e_ms", "tpot_ms")
COUNTS = (
    *("turn", "prompt_tokens", "cached_tokens", "reusable_tokens", "output_tokens", "max_tokens"),
    *("planned_prompt_tokens", "concurrency"),
)
ANSWERS = ("streamed", "held", "cancelled")


def read_run(trace: str | os.PathLike[str]) -> Run:
    """Read a trace of any format into arrays with a value per request, in file order, shape (n,).

    Times in ms, NaN: unknown. Counts in tokens, −1: unknown. ITLs of all requests are concatenated in ``gap_ms``,
    shape (gaps,), with the request's row in ``gap_owner``. Raises InputError.
    """
    return metrics.read_run(Path(trace))


def read_columns(run: Run) -> dict[str, Any]:
    """Return the columns of requests (latencies, tokens …: docs/fields.md), each of shape (n,); NaN: unknown."""
    return {
        "request_id": run.request_ids,
        "session_id": run.sessions,
        "parent_id": run.parents,
        "status": np.array(STATUSES)[run.status].tolist(),
        **{name: getattr(run, name) for name in TIMES},
        **{name: nan_if_unknown(getattr(run, name)) for name in COUNTS},
        **{name: getattr(run, name) for name in ANSWERS},
    }


def read_frame(trace: str | os.PathLike[str], library: FrameLibrary = "pandas") -> Any:
    """Read a trace into a ``DataFrame`` of pandas or Polars: n rows, a column for each of ``read_columns``.

    ``reusable_tokens`` and ``tpot_ms`` are computed: see docs/metrics.md. Raises InputError if the library is missing.
    """
    try:
        frames = importlib.import_module(library)
    except ImportError:
        raise InputError(f"{library}: not installed; expected pip install {library}") from None
    return frames.DataFrame(read_columns(read_run(trace)))


def measure_trace(
    trace: str | os.PathLike[str] | Run, *, gpus: int | None = None, slos: Sequence[str] = ()
) -> TraceMetrics:
    """Return all metrics of ``report show``: latency in ms, shares as fractions, throughput per second.

    ``slos``: thresholds such as ``ttft.p99<=500ms``, evaluated in ``slos`` of the result. Raises InputError.
    """
    run = trace if isinstance(trace, Run) else read_run(trace)
    return metrics.measure_run(run, gpus=gpus, slos=parse_slos(slos))
