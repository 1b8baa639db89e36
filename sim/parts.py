"""The compiled engine on arrivals that come in parts: memory follows the pool and the requests in flight.

Between two parts what is still in flight moves into a new world, before the new arrivals: the same state, at other
places. Keys of what is cached move along, so that evicted blocks are forgotten.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sim.compiled import arrival_heap, lay_out, run_world
from sim.config import EngineConfig
from sim.ending import Ending, endings_in
from sim.interning import Int64Array, chain_places
from sim.kernels import layout
from sim.kernels.chainpool import KNOWN
from sim.kernels.layout import ChainPool, Records, World
from sim.kernels.loop import NONE
from sim.model import Model
from sim.workload import Arrival

LOOKAHEAD = 1
"""Arrivals that a world is never without while more are to come: what happens next is then known."""
_LAID_OUT = ("first_key", "next_waiting", "previous_waiting")


class PartialRun:
    """A run whose arrivals are handed over part by part, in order of time, none waiting for another's end.

    A front end on a shared core takes arrivals in while a step runs, so with one all arrivals must come in one part.
    """

    def __init__(self, config: EngineConfig, model: Model, seed: int | None) -> None:
        self._config = config
        self._model = model
        self._seed = seed
        self._world: World | None = None
        self._arrivals: list[Arrival] = []
        self._arrived = 0
        self._told: npt.NDArray[np.bool_] = np.empty(0, bool)
        self._earlier_steps = 0

    @property
    def preemptions(self) -> int:
        """So far."""
        return 0 if self._world is None else int(self._world.clock["preemptions"][0])

    @property
    def engine_steps(self) -> int:
        """Steps so far in which the engine itself computed."""
        if self._world is None:
            return 0
        return self._earlier_steps + _engine_steps(self._world, 0, int(self._world.clock["num_steps"][0]))

    @property
    def certain_until_ms(self) -> float:
        """Nothing that was not returned yet arrives before."""
        if self._world is None:
            return -np.inf
        unfinished = self._world.flights["arrival_ms"][self._world.flights["outcome"] == layout.NO_OUTCOME]
        return float(unfinished.min()) if len(unfinished) else np.inf

    def feed(self, part: Sequence[Arrival], *, last: bool) -> list[Ending]:
        """Run until the next part is needed; what has ended since the last one, in order of arrival."""
        world = self._next_world(part, last)
        self._arrived += len(part)
        world.clock["lookahead"] = -1 if last else LOOKAHEAD
        self._world = world = run_world(world)
        ended = (world.flights["outcome"] != layout.NO_OUTCOME) & ~self._told
        self._told |= ended
        return list(endings_in(world, self._arrivals, np.flatnonzero(ended)))

    def _next_world(self, part: Sequence[Arrival], last: bool) -> World:
        old = self._world
        if old is None:
            self._arrivals, self._told = list(part), np.zeros(len(part), bool)
            return lay_out(part, self._config, self._model, self._seed, first_serial=None if last else 0)
        kept = _places_in_use(old)
        arrivals = [*(self._arrivals[place] for place in kept.tolist()), *part]
        new = lay_out(
            arrivals,
            self._config,
            self._model,
            self._seed,
            first_serial=self._arrived - len(kept),
            first_steps=len(old.timeline.ends_ms),
        )
        first_step = _first_step_in_use(old, kept)
        self._earlier_steps += _engine_steps(old, 0, first_step)
        _move_scheduler(old, new, kept)
        _move_flights(old, new, kept, first_step)
        pool = _moved_pool(old.scheduler.pool, new.scheduler.pool)
        self._told = np.append(self._told[kept], np.zeros(len(part), bool))
        self._arrivals = arrivals
        return new._replace(scheduler=new.scheduler._replace(pool=pool))


def _places_in_use(world: World) -> Int64Array:
    """Places that the world still speaks of: in flight, in a composed step, in an event."""
    clock, scheduler = world.clock[0], world.scheduler
    used = world.flights["outcome"] == layout.NO_OUTCOME
    if clock["composed"] != NONE:
        slot = int(clock["composed"])
        used[scheduler.shares["place"][slot, : scheduler.steps["count"][slot]]] = True
    used[world.events["code"][: clock["num_events"]] % len(used)] = True
    return np.flatnonzero(used)


def _first_step_in_use(world: World, kept: Int64Array) -> int:
    """Steps before it carried no token of a request in flight."""
    flights = world.flights[kept]
    first_tokens = flights["first_token"][flights["num_seen"] > 0]
    return int(world.token_steps[first_tokens].min(initial=int(world.clock["num_steps"][0])))


def _engine_steps(world: World, first: int, end: int) -> int:
    return int(np.count_nonzero(world.timeline.rows[first:end, 0]))


def _move_scheduler(old: World, new: World, kept: Int64Array) -> None:
    """Requests, who runs, who waits in which order, and the composed step."""
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


def _move_queue(before: Records, after: Records, moved_to: Int64Array) -> None:
    end, last = len(before) - 1, len(after) - 1
    place, line = int(before["next_waiting"][end]), [last]
    while place != end:
        line.append(int(moved_to[place]))
        place = int(before["next_waiting"][place])
    after["next_waiting"][line] = [*line[1:], last]
    after["previous_waiting"][[*line[1:], last]] = line


def _moved_pool(before: ChainPool, after: ChainPool) -> ChainPool:
    """All that is cached and held, with its keys behind those of the requests."""
    used = before.segments[1 : int(before.counts["num_segments"][0]) + 1]
    known = used["kind"] == KNOWN
    starts, lengths = used["start"][known], (used["end"] - used["start"])[known]
    keys = before.keys[chain_places(used["base"][known] + starts, lengths)]
    used["base"][known] = len(after.keys) + np.cumsum(lengths) - lengths - starts
    num_holds = int(before.counts["num_holds"][0])
    holds = np.zeros(max(len(after.holds), num_holds + 1), layout.HOLD)
    holds[: num_holds + 1] = before.holds[: num_holds + 1]
    return before._replace(holds=holds, keys=np.append(after.keys, keys))


def _move_flights(old: World, new: World, kept: Int64Array, first_step: int) -> None:
    """What clients see, what is to come, and the clock with its steps from ``first_step`` on."""
    before, after, moved_to = old.flights[kept], new.flights, _moved_to(old, kept)
    for name in layout.FLIGHT.names or ():
        if name != "first_token":
            after[name][: len(kept)] = before[name]
    seen = before["num_seen"]
    steps = old.token_steps[chain_places(before["first_token"], seen)] - first_step
    new.token_steps[chain_places(after["first_token"][: len(kept)], seen)] = steps
    clock, num_events = old.clock[0], int(old.clock["num_events"][0])
    # The order of codes stays as it was, so a heap stays a heap.
    is_abort, place = np.divmod(old.events["code"][:num_events], len(old.flights))
    new.events["code"][:num_events] = moved_to[place] + is_abort * len(after)
    new.events["time_ms"][:num_events] = old.events["time_ms"][:num_events]
    waits_outside = np.ones(len(after), bool)
    waits_outside[: len(kept)] = False
    waits_outside[moved_to[old.arrivals["code"][: clock["num_arrivals"]]]] = True
    outside = np.flatnonzero(waits_outside)
    new.arrivals[:] = arrival_heap(after, outside)
    num_steps = int(clock["num_steps"]) - first_step
    for part, source in zip(new.timeline, old.timeline, strict=True):
        part[:num_steps] = source[first_step : first_step + num_steps]
    new.clock[:] = old.clock
    new.clock["num_steps"], new.clock["num_arrivals"] = num_steps, len(outside)


def _moved_to(world: World, kept: Int64Array) -> Int64Array:
    """By old place: the new one."""
    moved_to = np.full(len(world.flights), -1, np.int64)
    moved_to[kept] = np.arange(len(kept))
    return moved_to
