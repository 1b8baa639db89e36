"""Step loop over the readable scheduler: the compiled one's own source, run by Python."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from measure.machinecode.kernels import stay_apart
from sim.kernels import layout, loop
from sim.kernels import scheduler as kernels
from sim.kernels.compiling import variant
from sim.kernels.layout import SimState
from sim.vllm.config import EngineConfig
from sim.vllm.hybrid import make_scheduler
from sim.vllm.request import Request
from sim.vllm.scheduler import Step
from sim.workload.arrivals import Arrivals
from tests.sim.oracles.plain_engine import request_of

_STATES = {"waiting": layout.WAITING, "running": layout.RUNNING, "finished": layout.FINISHED}


def run_readable(state: SimState, arrivals: Arrivals, config: EngineConfig) -> SimState:
    """Run ``state``, laid out of ``arrivals``, to its end."""
    bridge = _Bridge(arrivals, config)
    functions = (kernels.schedule, kernels.finish_step, kernels.accepts, kernels.add, kernels.abort)
    run = in_python(loop.run, {one: getattr(bridge, one.__name__) for one in functions})
    state = loop.run_state(state, run)
    bridge.note_counts(state)
    return state


def as_it_is(function: Any) -> Any:
    return function


def _nothing() -> None:
    pass


def in_python(kernel: Any, replaced: Mapping[Any, Any] | None = None, module: str = "") -> Callable[..., Any]:
    """Return an entry's source, run by Python on the same arrays."""
    function = variant(kernel, {stay_apart: _nothing, **(replaced or {})}, module, make=as_it_is)

    def run(*parts: Any) -> Any:
        with np.errstate(over="ignore"):
            return function(*map(with_attributes, parts))

    return run


class _Bridge:
    """The readable scheduler behind the compiled one's functions; what the loop reads is written to its arrays."""

    def __init__(self, arrivals: Arrivals, config: EngineConfig) -> None:
        self._scheduler = make_scheduler(config)
        self._arrivals = arrivals.objects()
        self._requests: dict[int, Request] = {}
        self._steps: dict[int, Step] = {}

    def accepts(self, _: Any, place: int) -> bool:
        return self._scheduler.accepts(self._request(place))

    def add(self, arrays: Any, place: int) -> None:
        request = self._request(place)
        request.arrival_ms = float(arrays.requests[place].arrival_ms)
        self._scheduler.add(request)
        self._note(arrays, request)

    def schedule(self, arrays: Any, slot: int) -> None:
        self._steps[slot] = step = self._scheduler.schedule()
        told = arrays.steps[slot]
        told.count, told.total_tokens, told.admitted = len(step.scheduled), step.total_tokens, len(step.admitted)
        told.preempted, told.repeated_tokens = len(step.preempted), step.repeated_tokens
        for number, (request, tokens, depth, samples) in enumerate(step.scheduled):
            share = arrays.shares[slot, number]
            share.place, share.num_tokens, share.depth, share.samples = request.index, tokens, depth, samples
        self._note(arrays, *step.admitted, *step.preempted)

    def finish_step(self, arrays: Any, slot: int) -> int:
        finished = self._scheduler.finish_step(self._steps.pop(slot))
        for number, request in enumerate(finished):
            arrays.finished[number] = request.index
        self._note(arrays, *finished)
        return len(finished)

    def abort(self, arrays: Any, place: int) -> None:
        self._scheduler.abort(self._request(place))
        self._note(arrays, self._request(place))

    def _request(self, place: int) -> Request:
        if place not in self._requests:
            self._requests[place] = request_of(self._arrivals[place], int(place))
        return self._requests[place]

    def _note(self, arrays: Any, *requests: Request) -> None:
        queues = arrays.state[0]
        queues.num_running, queues.num_waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        queues.is_quiet = 0  # each step is composed: what is freed outside a window may let a request in
        for request in requests:
            told = arrays.requests[request.index]
            told.state, told.preemptions = _STATES[request.state], request.preemptions
            told.cached_tokens = -1 if request.cached_tokens is None else request.cached_tokens

    def note_counts(self, state: SimState) -> None:
        for name in layout.PREFIX_STATS.names or ():
            state.scheduler.stats[name] = getattr(self._scheduler.stats, name)
        state.scheduler.pool.counts["evicted_blocks"] = self._scheduler.pool.evicted_blocks


def with_attributes(part: Any) -> Any:
    """Return the same arrays, whose records have their fields as attributes."""
    if isinstance(part, bool | int):
        return part
    if isinstance(part, tuple):
        return type(part)(*map(with_attributes, part))
    return part.view(np.recarray) if part.dtype.names else part
