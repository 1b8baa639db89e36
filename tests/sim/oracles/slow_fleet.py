"""A fleet as obviously as it can be written: after each request that is sent, its engine's plain run from the start.

A request that comes later changes nothing of what happened before, so the earliest arrival known is always true.
"""

from collections.abc import Sequence
from dataclasses import replace

from engines.routing.records import RoutedRequest
from engines.routing.router import Router
from sim.engine.fleets import FleetEngine, engine_seed
from tests.sim.oracles.arrival import Arrival
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import RequestRun


class SlowFleet:
    """Requests of sessions that a router sends one by one; a turn waits for its parent's predicted end."""

    def __init__(
        self, arrivals: Sequence[Arrival], engines: Sequence[FleetEngine], router: Router, seed: int | None
    ) -> None:
        self.arrivals, self.engines, self.router, self.seed = arrivals, engines, router, seed
        self.engine_of: dict[int, int] = {}
        self.runs: dict[int, RequestRun] = {}
        """By place: a request's run, as far as is known now."""
        self.sent: list[list[tuple[float, int]]] = [[] for _ in engines]
        """Times and places of what each engine got."""
        self.numbers: list[int] = []
        """Places in the order of sending."""
        self.told: set[tuple[int, str]] = set()

    def run(self) -> None:
        while (coming := min(self._shared(), default=None)) is not None:
            at_ms, place = coming
            arrival = self.arrivals[place]
            if arrival.kind == "as_recorded":
                self.runs[place] = RequestRun(arrival, at_ms, outcome="as_recorded", e2e_ms=arrival.record.e2e_ms)
                continue
            self._tell(at_ms)
            request = self._request(place, at_ms)
            engine = self.router.choose(request)
            self.router.sent(request, engine)
            self.engine_of[place] = engine
            self.numbers.append(place)
            self.sent[engine].append((at_ms, place))
            self._run_again(engine)

    def _shared(self) -> list[tuple[float, int]]:
        """Requests that have not come, with their times, as far as their parents' ends are known."""
        found = []
        for place, arrival in enumerate(self.arrivals):
            if place in self.runs:
                continue
            if arrival.parent is None:
                found.append((arrival.arrival_ms, place))
            elif arrival.parent in self.runs:
                before = self.runs[arrival.parent]
                at_ms = before.arrival_ms + (before.e2e_ms or 0.0) + arrival.think_ms
                if before.outcome in ("unservable", "parent_failed"):
                    self.runs[place] = RequestRun(arrival, at_ms, outcome="parent_failed")
                    return self._shared()
                found.append((at_ms, place))
        return found

    def _run_again(self, engine: int) -> None:
        mine = [replace(self.arrivals[place], arrival_ms=at_ms, parent=None) for at_ms, place in self.sent[engine]]
        one = self.engines[engine]
        alone = Engine(mine, one.config, one.model, seed=engine_seed(self.seed, engine), fast_forward=False).run()
        for (_, place), run in zip(self.sent[engine], alone.runs, strict=True):
            self.runs[place] = run

    def _tell(self, now_ms: float) -> None:
        """Tell the router of first tokens and ends up to now, in order."""
        events = []
        for number, place in enumerate(self.numbers):
            run = self.runs[place]
            if run.ttft_ms is not None:
                events.append((run.arrival_ms + run.ttft_ms, place, "first token", number))
            events.append((run.arrival_ms + (run.e2e_ms or 0.0), place, "the end", number))
        for at_ms, place, what, number in sorted(events):
            if at_ms > now_ms or (place, what) in self.told:
                continue
            self.told.add((place, what))
            if what == "first token":
                self.router.first_token(number)
            else:
                self.router.ended(number, at_ms / 1e3)

    def _request(self, place: int, at_ms: float) -> RoutedRequest:
        arrival, block_size = self.arrivals[place], self.engines[0].config.block_size
        blocks = arrival.record.block_hashes or []
        session = arrival.record.session_id
        return RoutedRequest(
            len(self.numbers),
            at_ms / 1e3,
            None if session is None else session.encode(),
            blocks[: arrival.prompt_tokens // block_size],
            block_size,
            arrival.prompt_tokens,
        )
