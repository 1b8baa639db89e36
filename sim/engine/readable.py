"""Step loop over the readable scheduler, for engines with several KV groups, which compiled code has not.

The loop is the compiled one's own source, run by Python; only the scheduler's functions are others. A step takes about
a hundred times as long.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import numpy as np

from measure.cache.machinecode import LateCode
from sim.engine.simstate import servable
from sim.kernels import layout, loop
from sim.kernels import scheduler as kernels
from sim.kernels.layout import SimState, Timeline
from sim.vllm.config import EngineConfig
from sim.vllm.hybridscheduler import make_scheduler
from sim.vllm.request import Request
from sim.vllm.scheduler import Step
from sim.workload.arrivals import Arrivals

_STATES = {"waiting": layout.WAITING, "running": layout.RUNNING, "finished": layout.FINISHED}


def run_engine(state: SimState, arrivals: Arrivals, config: EngineConfig) -> SimState:
    """Run ``state``, laid out of ``arrivals``, to its end: compiled if the engine has one KV group."""
    if config.kv_groups is None:
        return loop.run_state(state)
    bridge = _Bridge(arrivals, config)
    functions = (kernels.schedule, kernels.finish_step, kernels.accepts, kernels.add, kernels.abort)
    run = _uncompiled({id(one): getattr(bridge, one.__name__) for one in functions})(loop.run)
    with np.errstate(over="ignore"):  # random numbers are products that wrap around
        while run(_with_attributes(state)) == loop.FULL:
            state = state._replace(timeline=Timeline(*(loop.twice_as_long(part) for part in state.timeline)))
    bridge.note_counts(state)
    return state


def serves(arrivals: Arrivals, config: EngineConfig) -> bool:
    """Return if an engine can ever serve one of these requests."""
    if config.kv_groups is None:
        return bool(servable(arrivals, config).any())
    accepts = make_scheduler(config).accepts
    return any(accepts(one.request(0)) for one in arrivals.take(np.flatnonzero(arrivals.runs)).objects())


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
            self._requests[place] = self._arrivals[place].request(int(place))
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


def _with_attributes(part: Any) -> Any:
    """Return the same arrays, whose records have their fields as attributes."""
    if isinstance(part, tuple):
        return type(part)(*map(_with_attributes, part))
    return part.view(np.recarray) if part.dtype.names else part


def _uncompiled(replaced: Mapping[int, Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """Return a function that gives the Python source of a kernel, calling such of others, and ``replaced`` ones."""
    scopes: dict[str, dict[str, Any]] = {}

    def scope_of(names: dict[str, Any]) -> dict[str, Any]:
        module = names["__name__"]
        if module not in scopes:
            scopes[module] = scope = dict(names)
            scope.update({name: source_of(value) for name, value in names.items() if isinstance(value, LateCode)})
        return scopes[module]

    def source_of(compiled: Any) -> Callable[..., Any]:
        source = compiled.function
        return replaced.get(id(compiled)) or FunctionType(source.__code__, scope_of(source.__globals__))

    return source_of
