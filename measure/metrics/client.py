"""The client's own part in a run's times: lag behind the plan, and delays inside it as the trace keeps them."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from measure.live_counts import late_limit_ms
from measure.metrics.results import Client, Statistics
from measure.metrics.statistics import quantile_of, statistics_of
from measure.runs import Run
from tracefile.records.arrays import FloatArray
from tracefile.records.schema import Meta, Workload

DELAYS: Final = "client_delays"
"""Key of the header's ``workload`` that a run's end adds: ``loop_ms`` and ``crossing_ms``, each as statistics."""


PLANNERS: Final = ("client", "replay")
"""Sources of traces that a plan was sent for."""


def lag_ms_of(run: Run) -> FloatArray:
    """Return |arrival − schedule|; NaN for a request that a concurrency limit queued, and without a plan."""
    planned = ~run.held & (run.meta.source in PLANNERS)
    return np.where(planned, np.abs(run.arrival_ms - run.scheduled_ms), np.nan)


def measure_client(run: Run) -> Client:
    """Return lag, late requests and the delays that the header keeps."""
    lag_ms = lag_ms_of(run)
    limit_ms = late_limit_ms(quantile_of(run.ttft_ms, 0.5))
    delays = kept_delays(run.meta)
    return Client(
        lag_ms=statistics_of(lag_ms),
        limit_ms=limit_ms,
        late=int(np.count_nonzero(lag_ms > limit_ms)),
        held=int(np.count_nonzero(run.held)),
        loop_delay_ms=delays.get("loop_ms"),
        crossing_delay_ms=delays.get("crossing_ms"),
    )


def with_delays(meta: Meta, loop_ms: Sequence[float], crossing_ms: Sequence[float]) -> Meta:
    """Return the header with the delays of a run that has ended."""
    found = {"loop_ms": statistics_of(np.array(loop_ms)), "crossing_ms": statistics_of(np.array(crossing_ms))}
    told = {name: msgspec.to_builtins(one) for name, one in found.items() if one is not None}
    workload = meta.workload or Workload()
    workload = msgspec.structs.replace(workload, extra=workload.extra | {DELAYS: told})
    return msgspec.structs.replace(meta, workload=workload) if told else meta


def kept_delays(meta: Meta) -> dict[str, Statistics]:
    """Return the delays in a trace's latest header; none of other tools' words."""
    found: Any = {} if meta.workload is None else meta.workload.extra.get(DELAYS, {})
    try:
        return msgspec.convert(found, dict[str, Statistics])
    except msgspec.ValidationError:
        return {}
