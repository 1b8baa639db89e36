"""A fleet of compiled engines on one workload: their lives, and the results of the requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.engine.deployment import Deployment
from sim.engine.results import RequestResult, results_in
from sim.engine.routerstate import ASKS, CompiledRoute, router_pools, router_state
from sim.engine.simstate import arrival_heap, lay_out, lay_out_runs
from sim.engine.tiers import TierTraffic, traffic_in
from sim.kernels import layout
from sim.kernels.addresses import ENGINE_STATE, POOL, note, table
from sim.kernels.fleet import ALL_ENDED, BAD_CHAIN, FLEET_CLOCK, FLEET_ENGINE, FLEET_STATE, NO_ROOM, advance, look
from sim.kernels.fleet import Fleet as FleetState
from sim.kernels.layout import NONE, Records, SimState, Timeline
from sim.kernels.loop import twice_as_long
from sim.kernels.routing import Router
from sim.latency.modelfile import Model
from sim.latency.terms import STEPS
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import NOBODY, Arrivals
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError

FIRST_STEPS = 1 << 14
"""Steps in an engine's timeline at first; it doubles when it is full."""
_SPARE_TOKENS = 1.25
"""Room for tokens at first, over an equal share."""


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """An engine of a fleet."""

    name: str
    config: EngineConfig
    model: Model
    deployment: Deployment | None = None

    def __post_init__(self) -> None:
        if self.config.kv_groups is not None:
            raise InputError(f"kv_groups: {self.config.kv_groups}; expected one group in a fleet of engines")


@dataclass(frozen=True, slots=True)
class Life:
    """An engine from one cold start to the next, and the requests that ended in it."""

    engine: int
    state: SimState
    earlier_steps: int = 0
    """Steps of the engine that are no longer in the timeline."""

    @property
    def engine_steps(self) -> int:
        rows = self.state.timeline.rows[: self.state.clock["num_steps"].item()]
        return self.earlier_steps + int(np.count_nonzero(rows[:, STEPS]))


class Fleet:
    """A run of engines that share a workload. ``advance`` stops where a request needs an engine."""

    def __init__(
        self,
        arrivals: Arrivals,
        engines: Sequence[FleetEngine],
        seed: int | None,
        moves: int = 0,
        *,
        keeps_steps: bool = False,
        route: CompiledRoute = ASKS,
    ) -> None:
        """``seed``: None without noise. ``moves``: times that all requests in flight may go to another engine.
        ``keeps_steps``: timelines hold all steps; if not, as many as requests in flight need: memory that is not new
        is faster."""
        self.arrivals, self.engines, self._seed, self._keeps_steps = arrivals, engines, seed, keeps_steps
        self._alone = replace(arrivals, parents=np.full(len(arrivals), NOBODY))
        self._next_think_ms = _next_think_ms(arrivals)
        router = router_state(arrivals, engines[0].config.block_size, len(engines), route)
        self.state = _fleet_state(arrivals, len(engines), moves, router)
        self._addresses = table(2 * len(engines) + 1, ENGINE_STATE)
        note(self._addresses[-1], FLEET_STATE, self.state)
        self._pools = router_pools(arrivals, router, route)
        for row, pool in enumerate(self._pools, len(engines)):
            note(self._addresses[row], POOL, pool)
        self.lives = [Life(place, self._cold(place, 0)) for place in range(len(engines))]
        self.current = list(range(len(engines)))
        """Number of each engine's life now."""
        self._moved: set[int] = set()
        self._cached = np.zeros(len(engines), np.int64)
        self.life_of: IntArray = np.full(len(arrivals), NONE) if route is ASKS else router.sent["engine"]
        """Life in which each request last was; NONE: no engine got it."""
        for place, life in enumerate(self.lives):
            self._hand_out(place, life.state)

    def results(self) -> Iterator[RequestResult]:
        """Yield the results of all requests, which have ended."""
        for number, life in enumerate(self.lives):
            places = np.flatnonzero(self.life_of == number)
            name = self.engines[life.engine].name
            for result in self._results_in(life.state, places):
                result.record.upstream = name
                yield result
        for result in self._results_in(self.lives[0].state, np.flatnonzero(self.life_of == NONE)):
            if result.outcome != "as_recorded":
                result.record.upstream = None
            yield result

    def _results_in(self, state: SimState, places: IntArray) -> Iterator[RequestResult]:
        for name in ("outcome", "arrival_ms", "ttft_ms", "e2e_ms", "num_seen"):
            state.runs[name][places] = self.state.runs[name][places]
        return results_in(state, self.arrivals, places)

    @property
    def traffic(self) -> TierTraffic:
        return traffic_in([life.state for life in self.lives], [self.lives[number].state for number in self.current])

    @property
    def now_ms(self) -> float:
        return float(self.state.clock["now_ms"][0])

    def told(self) -> list[tuple[float, int]]:
        """Times and codes of first tokens and ends since the last stop, in order."""
        found: list[tuple[float, int]] = self.state.told[: self.state.clock["num_told"].item()].tolist()
        self.state.clock["num_told"] = 0
        return found

    def advance(self, place: int = NONE, engine: int = NONE) -> int:
        """Hand the request at ``place`` over to ``engine``, and run to the next request that needs one; below 0: none
        does, because all have ended or the clock is at ``stop_ms``."""
        if place >= 0:
            self.life_of[place] = self.current[engine]
            if place in self._moved:  # its client has waited already
                waited_ms = self.now_ms - float(self.state.runs["arrival_ms"][place])
                own = self.lives[self.current[engine]].state.runs["abort_after_ms"]
                own[place] = self.arrivals.abort_after_ms[place] - waited_ms
        while (stop := advance(self._addresses, place, engine)) == NO_ROOM:
            self._make_room(int(self.state.clock["engine"][0]))
            place = NONE
        if stop == BAD_CHAIN or (stop == ALL_ENDED and any(pool.counts["not_chained"][0] for pool in self._pools)):
            raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
        return stop

    def cached_blocks(self, place: int) -> list[int]:
        """Return, by engine, the leading blocks cached of the request at ``place``, which has just come."""
        look(self._addresses, place, self._cached)
        found: list[int] = self._cached.tolist()
        return found

    def lose(self, engine: int) -> tuple[list[int], list[int]]:
        """End an engine's life now; return its requests that come to the router again, having no token yet, and those
        that end here."""
        state, runs, clock = self.lives[self.current[engine]].state, self.state.runs, self.state.clock[0]
        events, now_ms = self.state.events, self.now_ms
        coming = events[: clock["num_events"]]
        of_life = self.life_of[coming["code"] // 2] == self.current[engine]
        of_life &= runs["outcome"][coming["code"] // 2] != layout.UNSERVABLE
        undone = np.unique(coming["code"][of_life] // 2)
        clock["num_events"] = _lay_out_heap(events, coming[~of_life])
        released = self.state.arrivals[: clock["num_arrivals"]]
        too_early = np.isin(runs["parent"][released["code"]], undone)
        clock["num_arrivals"] = _lay_out_heap(self.state.arrivals, released[~too_early])
        flying = self.state.in_flight[engine, : self.state.engines["num_in_flight"][engine]]
        moved, ended = [], []
        for place in np.union1d(undone, flying).tolist():
            first, count = int(state.runs["first_token"][place]), int(state.runs["num_seen"][place])
            seen_ms = state.timeline.seen_ms[state.token_steps[first : first + count]]
            seen_ms = seen_ms[seen_ms <= now_ms]
            if len(seen_ms):
                state.itl_ms[first + 1 : first + len(seen_ms)] = np.diff(seen_ms)
                runs["ttft_ms"][place] = seen_ms[0] - runs["arrival_ms"][place]
                self.end_here(place, layout.LOST, len(seen_ms))
                ended.append(place)
            else:
                runs["outcome"][place], runs["num_seen"][place] = layout.NO_OUTCOME, 0
                runs["ttft_ms"][place] = np.nan
                self.life_of[place] = NONE
                self._arrive(place, now_ms)
                moved.append(place)
        self._moved.update(moved)
        self.restart(engine, now_ms)
        return moved, ended

    def end_here(self, place: int, outcome: np.int64, tokens: int = 0) -> None:
        """End a request now; its session goes on."""
        runs = self.state.runs
        runs["outcome"][place], runs["num_seen"][place] = outcome, tokens
        runs["e2e_ms"][place] = self.now_ms - runs["arrival_ms"][place]
        child = int(runs["first_child"][place])
        while child != NONE:
            self._arrive(child, self.now_ms + runs["think_ms"][child])
            child = int(runs["next_child"][child])

    def _arrive(self, place: int, at_ms: float) -> None:
        clock = self.state.clock[0]
        known = np.append(self.state.arrivals[: clock["num_arrivals"]], np.array([(at_ms, place)], layout.EVENT))
        clock["num_arrivals"] = _lay_out_heap(self.state.arrivals, known)

    def restart(self, engine: int, at_ms: float) -> None:
        """Let an engine begin at ``at_ms`` with nothing cached: a new life, unless it has not served in this one."""
        now = self.lives[self.current[engine]].state
        if now.clock["num_steps"][0] == 0 and not (self.life_of == self.current[engine]).any():
            now.clock["now_ms"] = at_ms
            return
        state = self._cold(engine, len(self.lives))
        state.clock["now_ms"] = at_ms
        self.current[engine] = len(self.lives)
        self.lives.append(Life(engine, state))
        self.state.engines[engine] = (np.inf, np.inf, 0)
        self._hand_out(engine, state)

    def _hand_out(self, engine: int, state: SimState) -> None:
        note(self._addresses[engine], ENGINE_STATE, state)

    def _cold(self, engine: int, life: int) -> SimState:
        one, count = self.engines[engine], len(self.engines)
        asked = int(self.arrivals.output_tokens.sum())
        most = int(self.arrivals.output_tokens.max(initial=1))
        state = lay_out(
            self._alone,
            one.config,
            one.model,
            engine_seed(self._seed, engine if life < count else life),
            first_steps=FIRST_STEPS,
            token_room=min(asked, max(int(_SPARE_TOKENS * asked / count), 2 * most)) + 1,
            deployment=one.deployment,
        )
        state.clock["num_arrivals"] = 0
        state.scheduler.settings["pauses"] = 1
        state.runs["next_think_ms"] = self._next_think_ms
        return state

    def _make_room(self, engine: int) -> None:
        number = self.current[engine]
        life = self.lives[number]
        state, earlier = life.state, life.earlier_steps
        if int(state.clock["num_steps"][0]) + 1 >= len(state.timeline.ends_ms):
            first = 0 if self._keeps_steps else self._first_step_in_use(engine, state)
            if first > len(state.timeline.ends_ms) // 2:
                earlier += int(np.count_nonzero(state.timeline.rows[:first, STEPS]))
                _forget_steps(state, first)
            else:
                state = state._replace(timeline=Timeline(*map(twice_as_long, state.timeline)))
        else:
            steps, itl_ms = state.token_steps, state.itl_ms
            state = state._replace(
                token_steps=np.append(steps, np.zeros_like(steps)), itl_ms=np.append(itl_ms, np.zeros_like(itl_ms))
            )
        self.lives[number] = Life(engine, state, earlier)
        self._hand_out(engine, state)

    def _first_step_in_use(self, engine: int, state: SimState) -> int:
        """First step that carries a token of a request in flight, or of one whose end was not told."""
        flying = self.state.in_flight[engine, : self.state.engines["num_in_flight"][engine]]
        untold = self.state.events["code"][: self.state.clock["num_events"][0]] // 2
        places = np.append(flying, untold[self.life_of[untold] == self.current[engine]])
        speaking = places[state.runs["num_seen"][places] > 0]
        steps = state.token_steps[state.runs["first_token"][speaking]]
        return int(steps.min(initial=int(state.clock["num_steps"][0])))


def engine_seed(seed: int | None, number: int) -> int | None:
    """Seed of an engine's noise; the first has the run's own."""
    if seed is None or number == 0:
        return seed
    sequence = np.random.SeedSequence((seed & 0xFFFFFFFFFFFFFFFF, number))
    return int(sequence.generate_state(1, np.uint64)[0])


def _fleet_state(arrivals: Arrivals, engines: int, moves: int, router: Router) -> FleetState:
    count = len(arrivals)
    runs = lay_out_runs(arrivals)
    roots = np.flatnonzero(arrivals.parents == NOBODY)
    clock = np.zeros(1, FLEET_CLOCK)
    clock["num_arrivals"], clock["stop_ms"] = len(roots), np.inf
    clock["now_ms"] = min(arrivals.arrival_ms.min(initial=0.0), 0.0)
    known = np.zeros(engines, FLEET_ENGINE)
    known["resumes_ms"] = known["bound_ms"] = np.inf
    return FleetState(
        clock=clock,
        runs=runs,
        arrivals=arrival_heap(runs, roots),
        events=np.zeros(2 * count * (moves + 1) + 1, layout.EVENT),
        told=np.zeros(2 * count * (moves + 1) + 1, layout.EVENT),
        engines=known,
        in_flight=np.zeros((engines, count + 1), np.int64),
        router=router,
    )


def _forget_steps(state: SimState, first: int) -> None:
    """Drop the steps before ``first``, of which requests that ended no longer need any."""
    kept = int(state.clock["num_steps"][0]) - first
    for part in state.timeline:
        part[:kept] = part[first : first + kept].copy()
    state.token_steps[: state.clock["num_tokens"][0]] -= first
    state.clock["num_steps"] = kept


def _lay_out_heap(heap: Records, events: Records) -> int:
    """Write events into a heap that had as many or one less; return their number. Sorted events are a heap."""
    heap[: len(events)] = events[np.lexsort((events["code"], events["time_ms"]))]
    return len(events)


def _next_think_ms(arrivals: Arrivals) -> FloatArray:
    found = np.full(len(arrivals), np.inf)
    children = np.flatnonzero(arrivals.parents != NOBODY)
    parents = np.searchsorted(arrivals.numbers, arrivals.parents[children])
    np.minimum.at(found, parents, arrivals.think_ms[children])
    return found
