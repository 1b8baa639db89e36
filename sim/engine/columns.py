"""Columns of a workload's requests and of their results: tokens, block keys, latencies. mypyc compiles this module."""

from typing import Final

from librt.vecs import extend, vec
from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec
from sim.engine.simulatedrequest import SimulatedRequest

NO_PARENT: Final = -1


class RequestColumns:
    """Requests of a workload as columns: tokens, block keys, times. ``parents``: row of each request's parent."""

    def __init__(
        self,
        ids: list[str],
        keys: BoxedVec,
        integers: tuple[BoxedVec, BoxedVec, BoxedVec, BoxedVec, BoxedVec, BoxedVec, BoxedVec],
        times_ms: tuple[BoxedVec, BoxedVec, BoxedVec, BoxedVec],
    ) -> None:
        """``integers``: prompt tokens, output tokens, first block key, number of block keys, limit of the prefix hit in
        blocks, 1 for requests that end as recorded, parent. ``times_ms``: arrival, think time, time to the abort,
        recorded E2E latency."""
        self.ids: list[str] = ids
        self.keys: vec[i64] = keys
        self.prompt_tokens: vec[i64] = integers[0]
        self.output_tokens: vec[i64] = integers[1]
        self.first_keys: vec[i64] = integers[2]
        self.num_keys: vec[i64] = integers[3]
        self.hit_limits: vec[i64] = integers[4]
        self.as_recorded: vec[i64] = integers[5]
        self.parents: vec[i64] = integers[6]
        self.arrival_ms: vec[float] = times_ms[0]
        self.think_ms: vec[float] = times_ms[1]
        self.abort_after_ms: vec[float] = times_ms[2]
        self.recorded_e2e_ms: vec[float] = times_ms[3]

    def make(self, boxed_factors: BoxedVec) -> list[SimulatedRequest]:
        """Create the requests; ``index`` is the row. ``boxed_factors``: noise on the API server's time, by row."""
        frontend_factors: vec[float] = boxed_factors
        requests: list[SimulatedRequest] = []
        for index in range(len(self.ids)):
            request = SimulatedRequest(
                self.ids[index],
                max(self.prompt_tokens[index], 1),
                max(self.output_tokens[index], 1),
                self.keys,
                first_key=self.first_keys[index],
                num_keys=self.num_keys[index],
                index=index,
                arrival_ms=self.arrival_ms[index],
                hit_limit=self.hit_limits[index],
            )
            request.prepare()
            request.is_as_recorded = self.as_recorded[index] == 1
            request.think_ms = self.think_ms[index]
            request.abort_after_ms = self.abort_after_ms[index]
            request.recorded_e2e_ms = self.recorded_e2e_ms[index]
            request.frontend_factor = frontend_factors[index]
            requests.append(request)
        for index in range(len(self.ids)):
            if self.parents[index] != NO_PARENT:
                requests[index].has_parent = True
                requests[self.parents[index]].children.append(requests[index])
        return requests


class ResultColumns:
    """Results of requests as columns: latencies, tokens, preemptions (fields of ``SimulatedRequest``)."""

    def __init__(self, requests: list[SimulatedRequest]) -> None:
        self.outcome: vec[i64] = vec[i64]([request.outcome for request in requests])
        self.num_delivered: vec[i64] = vec[i64]([request.num_delivered for request in requests])
        self.cached_tokens: vec[i64] = vec[i64]([request.cached_tokens for request in requests])
        self.preemptions: vec[i64] = vec[i64]([request.preemptions for request in requests])
        self.arrival_ms: vec[float] = vec[float]([request.arrival_ms for request in requests])
        self.ttft_ms: vec[float] = vec[float]([request.ttft_ms for request in requests])
        self.e2e_ms: vec[float] = vec[float]([request.e2e_ms for request in requests])
        self.queue_ms: vec[float] = vec[float]([request.admitted_ms - request.entry_ms for request in requests])


class TokenRuns:
    """Scheduler steps that delivered tokens to an engine's requests.

    ``runs``: first step and number of consecutive steps with a token each, request by request. ``num_delivered``:
    tokens by request.
    """

    def __init__(self, requests: list[SimulatedRequest]) -> None:
        self.num_delivered: vec[i64] = vec[i64]([request.num_delivered for request in requests])
        self.runs: vec[i64] = vec[i64]()
        for request in requests:
            request.close_run()
            self.runs = extend(self.runs, request.token_runs)
