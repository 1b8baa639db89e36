"""When a front end on the engine's core worked on which requests, in a captured schedule.

It takes requests one at a time, and gets half of the core while the engine computes. How long it takes for one is what
a fit is after; so a fit begins as if each took no time, and asks again with what it found.
"""

from collections.abc import Sequence

import numpy as np

from sim.fit.capturedschedule import CapturedStep
from sim.latency.terms import Numbers, reception_ms
from sim.workload.arrivals import Arrival
from tracefile.records.arrays import FloatArray

_LEAST_MS = 1e-6
"""Of work on a request: it has to begin before it ends."""


class Reception:
    """How much of the front end's work was done by any time: in requests and in prompt tokens."""

    def __init__(self, arrivals: Sequence[Arrival], timeline: Sequence[CapturedStep], costs: Numbers) -> None:
        came = np.array(sorted((one.arrival_ms, one.prompt_tokens) for one in arrivals if one.kind == "runs"))
        came_ms, tokens = came.reshape(-1, 2).T
        # A step after a rest begins when the request that ended it has been received, with nothing beside.
        rested_ms = [
            0.0 if one.opener is None else reception_ms(costs, arrivals[one.opener].prompt_tokens) for one in timeline
        ]
        steps = [(one.start_ms + rest_ms, one.end_ms) for one, rest_ms in zip(timeline, rested_ms, strict=True)]
        self._moments_ms, self._cores_ms = _core_time(steps, float(came_ms.min(initial=np.inf)))
        done_ms = -np.inf
        edges_ms: list[float] = []
        for arrived_ms, prompt_tokens in zip(self._core_ms(came_ms), tokens, strict=True):
            began_ms = max(float(arrived_ms), done_ms)
            done_ms = began_ms + max(float(reception_ms(costs, prompt_tokens)), _LEAST_MS)
            edges_ms += [began_ms, done_ms]
        self._edges_ms = np.array(edges_ms)
        self._requests = np.repeat(np.arange(len(came) + 1.0), 2)[1:-1]
        self._tokens = np.repeat(np.cumsum([0.0, *tokens]), 2)[1:-1]

    def between(self, begun_ms: float, end_ms: float) -> tuple[float, float]:
        """Requests and prompt tokens received in a stretch of time, with what was in part in part."""
        cores_ms = self._core_ms(np.array([begun_ms, end_ms]))
        requests = np.interp(cores_ms, self._edges_ms, self._requests)
        tokens = np.interp(cores_ms, self._edges_ms, self._tokens)
        return float(requests[1] - requests[0]), float(tokens[1] - tokens[0])

    def _core_ms(self, times_ms: FloatArray) -> FloatArray:
        return np.interp(times_ms, self._moments_ms, self._cores_ms)


def _core_time(steps: Sequence[tuple[float, float]], first_ms: float) -> tuple[FloatArray, FloatArray]:
    """Moments, and how long the front end could have worked by each: all of the time between steps, half of it in
    them. Between two moments it grows evenly. ``steps``: when each began and ended."""
    moments_ms, cores_ms = [first_ms], [0.0]
    for start_ms, end_ms in steps:
        for until_ms, share in ((start_ms, 1.0), (end_ms, 0.5)):
            span_ms = until_ms - moments_ms[-1]
            if span_ms > 0.0:
                moments_ms.append(until_ms)
                cores_ms.append(cores_ms[-1] + share * span_ms)
    return np.array(moments_ms), np.array(cores_ms)
