"""Compiled engine on arrivals that come in parts: memory follows the pool and the requests in flight.

Between two parts the requests in flight move into a new state, before the new arrivals, at other places. Keys of cached
blocks move along, so evicted blocks are forgotten. Within a part the arenas of tokens and the timeline are as long as
the running requests need, and are emptied when full.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from measure.cache.chains import chain_places
from sim.engine.deployment import Deployment
from sim.engine.results import RequestResult, results_in
from sim.engine.simstate import arrival_heap, lay_out, loop_of
from sim.engine.tiers import TierTraffic, in_list, traffic_of
from sim.kernels import layout
from sim.kernels.groups import GroupPool, with_tables
from sim.kernels.layout import NONE, Records, SimState, Tier
from sim.kernels.loop import FULL, NOT_CHAINED
from sim.kernels.pool import with_keys
from sim.latency.modelfile import Model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import NOBODY, Arrivals
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError

FIRST_STEPS = 1 << 16
"""Steps in the timeline at first."""
FIRST_TOKENS = 1 << 21
"""Tokens in the arenas at first. Either doubles when more than half of it is in use."""
_LAID_OUT = ("first_key", "next_waiting", "previous_waiting")
_LINKS = ("first_token", "parent", "first_child", "next_child")


class _Parent(NamedTuple):
    """End of a request whose children have not all been handed over."""

    end_ms: float
    failed: bool
    last_child: int


class StreamingRun:
    """Run whose arrivals are handed over in parts, by earliest possible time, parents before their children."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        seed: int | None,
        run_on: Callable[[SimState], int] | None = None,
        *,
        deployment: Deployment | None = None,
    ) -> None:
        """``run_on``: a loop that logs; None: the engine's."""
        self._deployment = deployment
        self._run_on = run_on or loop_of(config)
        self._config = config
        self._model = model
        self._seed = seed
        self._state: SimState | None = None
        self._arrivals: Arrivals | None = None
        self._told: npt.NDArray[np.bool_] = np.empty(0, bool)
        self._pending: list[Arrivals] = []
        self._parents: dict[int, _Parent] = {}
        self._earlier_steps = 0

    @property
    def preemptions(self) -> int:
        return 0 if self._state is None else int(self._state.clock["preemptions"][0])

    @property
    def engine_steps(self) -> int:
        """Steps so far in which the engine itself computed."""
        if self._state is None:
            return 0
        return self._earlier_steps + _engine_steps(self._state, int(self._state.clock["num_steps"][0]))

    @property
    def traffic(self) -> TierTraffic | None:
        """Traffic of the memory behind the pool; None: there is none."""
        return None if self._state is None or self._deployment is None else traffic_of([self._state])

    @property
    def in_flight_ms(self) -> FloatArray:
        if self._state is None:
            return np.empty(0)
        return np.asarray(self._state.runs["arrival_ms"][_in_flight(self._state)])

    @property
    def certain_until_ms(self) -> float:
        """Time before which no further request ends, or arrives unless it is in flight."""
        state = self._state
        if state is None:
            return -np.inf
        in_flight, now_ms = _in_flight(state), float(state.clock["now_ms"][0])
        left_ms = (state.runs["arrival_ms"] + state.runs["abort_after_ms"])[in_flight]
        coming_ms = state.arrivals["time_ms"][: min(int(state.clock["num_arrivals"][0]), 1)]
        ends_ms = [now_ms] if len(left_ms) else []
        known_ms = np.concatenate([ends_ms, left_ms[~np.isnan(left_ms)], coming_ms, state.clock["horizon_ms"]])
        return float(known_ms.min())

    def feed(self, part: Arrivals, until_ms: float) -> Iterator[list[RequestResult]]:
        """Run until the next part is needed; yield new results. ``until_ms``: the next part's earliest arrival."""
        self._pending.append(part)
        in_flight = 0 if self._state is None else int(_in_flight(self._state).sum())
        if until_ms < np.inf and sum(map(len, self._pending)) < in_flight // 2:
            return  # moving all that is in flight for as few would cost more than they do
        state = self._next_state(self._pending[0].followed_by(*self._pending[1:]))
        self._pending = []
        state.clock["horizon_ms"] = until_ms
        stop = FULL
        while stop == FULL:
            stop = self._run_on(state)
            if stop == NOT_CHAINED:
                raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
            self._state = state
            yield self._new_results(state)
            if stop == FULL:
                state = self._with_room(state)
        self._parents = {
            number: parent for number, parent in self._parents.items() if parent.last_child > part.numbers[-1]
        }

    def _new_results(self, state: SimState) -> list[RequestResult]:
        assert self._arrivals is not None
        ended = (state.runs["outcome"] != layout.NO_OUTCOME) & ~self._told
        self._told |= ended
        places = np.flatnonzero(ended)
        awaited = places[self._arrivals.last_children[places] > self._arrivals.numbers[-1:].max(initial=NOBODY)]
        for place in awaited.tolist():
            request_run = state.runs[place]
            end_ms = float(request_run["arrival_ms"] + np.nan_to_num(request_run["e2e_ms"]))
            failed = bool(request_run["outcome"] in (layout.UNSERVABLE, layout.PARENT_FAILED))
            number, last = int(self._arrivals.numbers[place]), int(self._arrivals.last_children[place])
            self._parents[number] = _Parent(end_ms, failed, last)
        return list(results_in(state, self._arrivals, places))

    def _next_state(self, part: Arrivals) -> SimState:
        part, failed = self._after_parents(part)
        old = self._state
        if old is None or self._arrivals is None:
            self._arrivals, self._told = part, np.zeros(len(part), bool)
            return self._laid_out(part, FIRST_STEPS, FIRST_TOKENS)
        kept = _places_in_use(old)
        arrivals = _without_gone(self._arrivals.take(kept).followed_by(part))
        new = self._laid_out(arrivals, len(old.timeline.ends_ms), len(old.token_steps))
        speaking = np.flatnonzero(_has_tokens(old))
        first_step = _first_step_in_use(old, speaking)
        self._earlier_steps += _engine_steps(old, first_step)
        new.runs["outcome"][len(kept) :][failed] = layout.PARENT_FAILED
        _move_scheduler(old, new, kept)
        _move_runs(old, new, kept)
        new = _move_tokens(old, new, speaking, np.searchsorted(kept, speaking), first_step)
        pool = _moved_pool(old.scheduler.pool, new.scheduler.pool)
        self._told = np.append(self._told[kept], np.zeros(len(part), bool))
        self._arrivals = arrivals
        tier = _moved_tier(old.scheduler.tier, new.scheduler.tier, kept, _moved_to(old, kept))
        return new._replace(scheduler=new.scheduler._replace(pool=pool, tier=tier))

    def _laid_out(self, arrivals: Arrivals, first_steps: int, token_room: int) -> SimState:
        return lay_out(
            arrivals,
            self._config,
            self._model,
            self._seed,
            first_steps=first_steps,
            token_room=token_room,
            deployment=self._deployment,
        )

    def _with_room(self, state: SimState) -> SimState:
        """Drop what only ended requests needed; lengthen the arrays if that is not enough."""
        places = np.flatnonzero(_has_tokens(state))
        first_step, num_tokens = _first_step_in_use(state, places), int(state.clock["num_tokens"][0])
        self._earlier_steps += _engine_steps(state, first_step)
        is_long = int(state.clock["num_steps"][0]) + 1 >= len(state.timeline.ends_ms)
        steps = len(state.timeline.ends_ms)
        steps *= 2 if is_long and int(state.clock["num_steps"][0]) - first_step >= steps // 2 else 1
        tokens, used = len(state.token_steps), int(_token_room(state, places).sum())
        tokens *= 2 if not is_long and (used > tokens // 2 or used == num_tokens) else 1
        roomy = state._replace(
            token_steps=np.zeros(tokens, np.int32),
            itl_ms=np.zeros(tokens),
            timeline=layout.Timeline(*(np.empty((steps, *part.shape[1:])) for part in state.timeline)),
        )
        return _move_tokens(state, roomy, places, places, first_step)

    def _after_parents(self, part: Arrivals) -> tuple[Arrivals, npt.NDArray[np.bool_]]:
        """Return ``part`` with arrival times of children whose parents have ended; mark children of failed parents."""
        failed = np.zeros(len(part), bool)
        if not self._parents:
            return part, failed
        arrival_ms, parents = part.arrival_ms.copy(), part.parents.copy()
        for place in np.flatnonzero(parents != NOBODY).tolist():
            parent = self._parents.get(int(parents[place]))
            if parent is None:
                continue
            parents[place] = NOBODY
            arrival_ms[place] = parent.end_ms + part.think_ms[place]
            if parent.failed:
                failed[place] = True
                last_child = int(part.last_children[place])
                self._parents[int(part.numbers[place])] = _Parent(float(arrival_ms[place]), True, last_child)
        return replace(part, arrival_ms=arrival_ms, parents=parents), failed


def _in_flight(state: SimState) -> npt.NDArray[np.bool_]:
    arrived = state.scheduler.requests["state"][:-1] != layout.ABSENT
    return np.asarray((state.runs["outcome"] == layout.NO_OUTCOME) & arrived)


def _without_gone(arrivals: Arrivals) -> Arrivals:
    """Turn children whose parent is gone into roots: it has ended and released them."""
    places = np.searchsorted(arrivals.numbers, arrivals.parents)
    there = arrivals.numbers[np.minimum(places, len(arrivals) - 1)] == arrivals.parents
    return replace(arrivals, parents=np.where(there, arrivals.parents, NOBODY))


def _places_in_use(state: SimState) -> IntArray:
    """Places still in use: in flight, in a composed step, in an event, or in the API server."""
    clock, scheduler = state.clock[0], state.scheduler
    used = state.runs["outcome"] == layout.NO_OUTCOME
    if clock["composed"] != NONE:
        slot = int(clock["composed"])
        used[scheduler.shares["place"][slot, : scheduler.steps["count"][slot]]] = True
    used[state.events["code"][: clock["num_events"]] % len(used)] = True
    used[state.jobs[clock["first_job"] : clock["last_job"]]] = True
    used[state.done["code"][: clock["num_done"]]] = True
    used[in_list(scheduler.tier, "first_ended")] = True
    return np.flatnonzero(used)


def _first_step_in_use(state: SimState, places: IntArray) -> int:
    """First step that carries a token of the requests at ``places``, which have tokens or room for them."""
    first_tokens = state.runs["first_token"][places][state.runs["num_seen"][places] > 0]
    return int(state.token_steps[first_tokens].min(initial=int(state.clock["num_steps"][0])))


def _engine_steps(state: SimState, end: int) -> int:
    return int(np.count_nonzero(state.timeline.rows[:end, 0]))


def _token_room(state: SimState, places: IntArray) -> IntArray:
    requests = state.scheduler.requests
    return np.asarray(requests["last_token"][places] - requests["prompt_tokens"][places])


def _has_tokens(state: SimState) -> npt.NDArray[np.bool_]:
    """Mark requests with tokens, or room for them, that are still to be read."""
    runs = state.runs
    return np.asarray((runs["first_token"] != NONE) & (runs["outcome"] == layout.NO_OUTCOME))


def _move_scheduler(old: SimState, new: SimState, kept: IntArray) -> None:
    before, after, moved_to = old.scheduler, new.scheduler, _moved_to(old, kept)
    requests = before.requests[kept]
    for name in layout.REQUEST.names or ():
        if name not in _LAID_OUT:
            after.requests[name][: len(kept)] = requests[name]
    for name in ("steps", "state", "stats"):
        getattr(after, name)[:] = getattr(before, name)
    num_running, slot = int(before.state["num_running"][0]), int(old.clock["composed"][0])
    after.running[:num_running] = moved_to[before.running[:num_running]]
    if slot != NONE:
        count = int(before.steps["count"][slot])
        after.shares[slot, :count] = before.shares[slot, :count]
        after.shares["place"][slot, :count] = moved_to[before.shares["place"][slot, :count]]
    _move_queue(before.requests, after.requests, moved_to)


def _move_queue(before: Records, after: Records, moved_to: IntArray) -> None:
    end, last = len(before) - 1, len(after) - 1
    next_waiting = before["next_waiting"].tolist()
    place, line = next_waiting[end], [end]
    while place != end:
        line.append(place)
        place = next_waiting[place]
    moved = np.append(last, moved_to[line[1:]])
    after["next_waiting"][moved] = np.roll(moved, -1)
    after["previous_waiting"][moved] = np.roll(moved, 1)


def _moved_pool(before: Any, after: Any) -> Any:
    if isinstance(before, GroupPool):
        return with_tables(before, after)
    num_holds = int(before.counts["num_holds"][0])
    holds = np.zeros(max(len(after.holds), num_holds + 1), layout.HOLD)
    holds[: num_holds + 1] = before.holds[: num_holds + 1]
    return with_keys(before, after.keys)._replace(holds=holds)


def _moved_tier(before: Tier, after: Tier, kept: IntArray, moved_to: IntArray) -> Tier:
    if not before.state["is_on"][0]:
        return after
    rows = before.requests[kept]
    rows["next"] = np.where(rows["next"] >= 0, moved_to[rows["next"]], NONE)
    after.requests[: len(kept)] = rows
    for name in ("first_loading", "first_ended", "last_ended"):
        place = int(before.state[name][0])
        before.state[name] = NONE if place == NONE else moved_to[place]
    return before._replace(requests=after.requests)


def _move_runs(old: SimState, new: SimState, kept: IntArray) -> None:
    before, after, moved_to = old.runs[kept], new.runs, _moved_to(old, kept)
    for name in layout.REQUEST_RUN.names or ():
        if name not in _LINKS:
            after[name][: len(kept)] = before[name]
    clock, num_events = old.clock[0], int(old.clock["num_events"][0])
    # The order of codes stays as it was, so a heap stays a heap.
    is_abort, place = np.divmod(old.events["code"][:num_events], len(old.runs))
    new.events["code"][:num_events] = moved_to[place] + is_abort * len(after)
    new.events["time_ms"][:num_events] = old.events["time_ms"][:num_events]
    coming = old.arrivals[: clock["num_arrivals"]]
    after["arrival_ms"][moved_to[coming["code"]]] = coming["time_ms"]
    waits_outside = (after["parent"] == NONE) & (after["outcome"] == layout.NO_OUTCOME)
    waits_outside[: len(kept)] = False
    waits_outside[moved_to[coming["code"]]] = True
    outside = np.flatnonzero(waits_outside)
    new.arrivals[:] = arrival_heap(after, outside)
    jobs, num_done = old.jobs[clock["first_job"] : clock["last_job"]], clock["num_done"]
    new.jobs[: len(jobs)] = moved_to[jobs]
    new.done[:num_done] = old.done[:num_done]
    new.done["code"][:num_done] = moved_to[old.done["code"][:num_done]]
    new.clock[:] = old.clock
    new.clock["num_arrivals"], new.clock["first_job"], new.clock["last_job"] = len(outside), 0, len(jobs)


def _move_tokens(old: SimState, new: SimState, places: IntArray, new_places: IntArray, first_step: int) -> SimState:
    """Move the tokens of the requests at ``places`` and the steps from ``first_step`` on; lengthen arenas if needed."""
    before, room = old.runs[places], _token_room(old, places)
    if room.sum() > len(new.token_steps):
        new = new._replace(token_steps=np.zeros(2 * room.sum(), np.int32), itl_ms=np.zeros(2 * room.sum()))
    firsts, seen = np.cumsum(room) - room, before["num_seen"]
    steps = old.token_steps[chain_places(before["first_token"], seen)] - first_step
    new.token_steps[chain_places(firsts, seen)] = steps
    new.runs["first_token"][new_places] = firsts
    num_steps = int(old.clock["num_steps"][0]) - first_step
    for part, source in zip(new.timeline, old.timeline, strict=True):
        part[:num_steps] = source[first_step : first_step + num_steps]
    new.clock["num_steps"], new.clock["num_tokens"] = num_steps, room.sum()
    return new


def _moved_to(state: SimState, kept: IntArray) -> IntArray:
    moved_to = np.full(len(state.runs), -1, np.int64)
    moved_to[kept] = np.arange(len(kept))
    return moved_to
