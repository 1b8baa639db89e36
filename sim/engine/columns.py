"""Requests of a workload from columns of numbers, and their results as columns. mypyc compiles this module."""

from typing import Final

from librt.vecs import extend, vec
from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec
from sim.engine.simulatedrequest import SimulatedRequest

NO_PARENT: Final = -1


class RequestColumns:
    """Requests of a workload. A number per request; ``parents``: places of the requests whose ends they wait for."""

    def __init__(
        self,
        ids: list[str],
        keys: BoxedVec,
        integers: tuple[BoxedVec, BoxedVec, BoxedVec, BoxedVec, BoxedVec, BoxedVec, BoxedVec],
        times_ms: tuple[BoxedVec, BoxedVec, BoxedVec, BoxedVec],
    ) -> None:
        """``integers``: prompt tokens, output tokens, first key, known keys, blocks that may hit,
        1 for requests that end as recorded, parent. ``times_ms``: arrival, think time, time to the abort,
        recorded duration."""
        self.ids: list[str] = ids
        self.keys: vec[i64] = keys
        self.prompt_tokens: vec[i64] = integers[0]
        self.output_tokens: vec[i64] = integers[1]
        self.first_keys: vec[i64] = integers[2]
        self.known_keys: vec[i64] = integers[3]
        self.hit_limits: vec[i64] = integers[4]
        self.as_recorded: vec[i64] = integers[5]
        self.parents: vec[i64] = integers[6]
        self.arrival_ms: vec[float] = times_ms[0]
        self.think_ms: vec[float] = times_ms[1]
        self.abort_after_ms: vec[float] = times_ms[2]
        self.recorded_e2e_ms: vec[float] = times_ms[3]

    def make(self, boxed_factors: BoxedVec) -> list[SimulatedRequest]:
        """Make an object per request; its index is its place. ``boxed_factors``: noise on the API server's time."""
        frontend_factors: vec[float] = boxed_factors
        requests: list[SimulatedRequest] = []
        for index in range(len(self.ids)):
            request = SimulatedRequest(
                self.ids[index],
                max(self.prompt_tokens[index], 1),
                max(self.output_tokens[index], 1),
                self.keys,
                first_key=self.first_keys[index],
                known_keys=self.known_keys[index],
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
    """Results of requests, as of ``SimulatedRequest``."""

    def __init__(self, requests: list[SimulatedRequest]) -> None:
        self.outcome: vec[i64] = vec[i64]([request.outcome for request in requests])
        self.num_seen: vec[i64] = vec[i64]([request.num_seen for request in requests])
        self.cached_tokens: vec[i64] = vec[i64]([request.cached_tokens for request in requests])
        self.preemptions: vec[i64] = vec[i64]([request.preemptions for request in requests])
        self.arrival_ms: vec[float] = vec[float]([request.arrival_ms for request in requests])
        self.ttft_ms: vec[float] = vec[float]([request.ttft_ms for request in requests])
        self.e2e_ms: vec[float] = vec[float]([request.e2e_ms for request in requests])
        self.queue_ms: vec[float] = vec[float]([request.admitted_ms - request.entry_ms for request in requests])


class TokenRuns:
    """Steps that gave tokens to requests of one engine.

    ``runs``: first step and number of consecutive steps, each with a token, request after request. ``num_seen``: tokens
    of each request.
    """

    def __init__(self, requests: list[SimulatedRequest]) -> None:
        self.num_seen: vec[i64] = vec[i64]([request.num_seen for request in requests])
        self.runs: vec[i64] = vec[i64]()
        for request in requests:
            request.close_run()
            self.runs = extend(self.runs, request.token_runs)
