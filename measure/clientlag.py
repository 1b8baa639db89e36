"""Lag of the client that wrote a trace, read from its records."""

from dataclasses import dataclass

import numpy as np

from measure.lateness import LAG_LEVEL, late_limit_ms
from measure.quantiles import quantile
from measure.runs import Run


@dataclass(frozen=True, slots=True)
class ClientLag:
    """Lag over the requests that have both times."""

    requests: int
    p99_ms: float
    limit_ms: float
    late: int
    """Requests above the limit."""

    @property
    def flagged(self) -> bool:
        """True if the latencies of the run are not to be trusted."""
        return self.p99_ms > self.limit_ms


def client_lag(run: Run) -> ClientLag | None:
    """Return the lag of a client's or a replay's trace; null: no plan, or a limit may have queued some."""
    workload = run.meta.workload
    capped = workload is not None and workload.extra.get("parallel") is not None
    if run.meta.source not in {"client", "replay"} or capped:
        return None
    lag_ms = np.abs(run.arrival_ms - run.scheduled_ms)
    lag_ms = np.sort(lag_ms[~np.isnan(lag_ms)])
    if not len(lag_ms):
        return None
    ttft_ms = np.sort(run.ttft_ms[~np.isnan(run.ttft_ms)])
    limit_ms = late_limit_ms(quantile(ttft_ms, 0.5) if len(ttft_ms) else None)
    return ClientLag(len(lag_ms), quantile(lag_ms, LAG_LEVEL), limit_ms, int(np.count_nonzero(lag_ms > limit_ms)))
