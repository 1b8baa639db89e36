"""Whether the client that wrote a trace sent its requests when it should have: else its latencies are its own."""

from dataclasses import dataclass

import numpy as np

from measure.lateness import late_limit_ms
from measure.runs import Run


@dataclass(frozen=True, slots=True)
class ClientLag:
    """Send minus schedule over the requests that have both, in ms."""

    requests: int
    p99_ms: float
    limit_ms: float
    late: int
    """How many are above the limit."""

    @property
    def flagged(self) -> bool:
        """Whether the run's latencies are not to be trusted."""
        return self.p99_ms > self.limit_ms


def client_lag(run: Run) -> ClientLag | None:
    """A client's or a replay's lag; null: nobody planned, or a cap on requests in flight may have held some back."""
    workload = run.meta.workload
    capped = workload is not None and workload.extra.get("parallel") is not None
    if run.meta.source not in {"client", "replay"} or capped:
        return None
    lag_ms = run.arrival_ms - run.scheduled_ms
    lag_ms = lag_ms[~np.isnan(lag_ms)]
    if not len(lag_ms):
        return None
    came_ms = run.ttft_ms[~np.isnan(run.ttft_ms)]
    limit_ms = late_limit_ms(float(np.median(came_ms)) if len(came_ms) else None)
    return ClientLag(len(lag_ms), float(np.quantile(lag_ms, 0.99)), limit_ms, int(np.count_nonzero(lag_ms > limit_ms)))
