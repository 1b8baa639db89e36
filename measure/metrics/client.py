"""Client overhead in a run's latencies: lag behind the schedule, and recorded delays inside the client."""

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
"""Key of the header's ``workload`` at the end of a run: statistics ``loop_ms`` and ``crossing_ms``."""


PLANNERS: Final = ("client", "replay")
"""Sources of traces with a schedule."""


def lag_ms_of(run: Run) -> FloatArray:
    """Return the lag |arrival − schedule| in ms; NaN: no schedule, or queued by a concurrency limit."""
    planned = ~run.held & (run.meta.source in PLANNERS)
    return np.where(planned, np.abs(run.arrival_ms - run.scheduled_ms), np.nan)


def measure_client(run: Run) -> Client:
    """Return client lag, late requests and the delays in the header."""
    lag_ms = lag_ms_of(run)
    limit_ms = late_limit_ms(quantile_of(run.ttft_ms, 0.5))
    delays = recorded_delays(run.meta)
    return Client(
        lag_ms=statistics_of(lag_ms),
        limit_ms=limit_ms,
        late=int(np.count_nonzero(lag_ms > limit_ms)),
        held=int(np.count_nonzero(run.held)),
        loop_delay_ms=delays.get("loop_ms"),
        crossing_delay_ms=delays.get("crossing_ms"),
    )


def with_delays(meta: Meta, loop_ms: Sequence[float], crossing_ms: Sequence[float]) -> Meta:
    """Return the header with the client delays of an ended run."""
    samples = {"loop_ms": statistics_of(np.array(loop_ms)), "crossing_ms": statistics_of(np.array(crossing_ms))}
    delays = {name: msgspec.to_builtins(statistics) for name, statistics in samples.items() if statistics is not None}
    workload = meta.workload or Workload()
    workload = msgspec.structs.replace(workload, extra=workload.extra | {DELAYS: delays})
    return msgspec.structs.replace(meta, workload=workload) if delays else meta


def recorded_delays(meta: Meta) -> dict[str, Statistics]:
    """Return the client delays in a trace's latest header; empty for malformed entries of other tools."""
    delays: Any = {} if meta.workload is None else meta.workload.extra.get(DELAYS, {})
    try:
        return msgspec.convert(delays, dict[str, Statistics])
    except msgspec.ValidationError:
        return {}
