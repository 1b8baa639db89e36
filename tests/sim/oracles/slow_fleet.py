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
        """By position: a request's run, as far as is known now."""
        self.sent: list[list[tuple[float, int]]] = [[] for _ in engines]
        """Times and positions of the requests of each engine."""
        self.numbers: list[int] = []
        """Places in the order of sending."""
        self.reported: set[tuple[int, str]] = set()

    def run(self) -> None:
        while (coming := min(self._shared(), default=None)) is not None:
            at_ms, position = coming
            arrival = self.arrivals[position]
            if arrival.kind == "as_recorded":
                self.runs[position] = RequestRun(arrival, at_ms, outcome="as_recorded", e2e_ms=arrival.record.e2e_ms)
                continue
            self._report(at_ms)
            request = self._request(position, at_ms)
            engine = self.router.choose(request)
            self.router.sent(request, engine)
            self.engine_of[position] = engine
            self.numbers.append(position)
            self.sent[engine].append((at_ms, position))
            self._run_again(engine)

    def _shared(self) -> list[tuple[float, int]]:
        """Requests that have not come, with their times, as far as their parents' ends are known."""
        result = []
        for position, arrival in enumerate(self.arrivals):
            if position in self.runs:
                continue
            if arrival.parent is None:
                result.append((arrival.arrival_ms, position))
            elif arrival.parent in self.runs:
                before = self.runs[arrival.parent]
                at_ms = before.arrival_ms + (before.e2e_ms or 0.0) + arrival.think_ms
                if before.outcome in ("unservable", "parent_failed"):
                    self.runs[position] = RequestRun(arrival, at_ms, outcome="parent_failed")
                    return self._shared()
                result.append((at_ms, position))
        return result

    def _run_again(self, engine: int) -> None:
        sent = [
            replace(self.arrivals[position], arrival_ms=at_ms, parent=None) for at_ms, position in self.sent[engine]
        ]
        each = self.engines[engine]
        alone = Engine(sent, each.config, each.model, seed=engine_seed(self.seed, engine), fast_forward=False).run()
        for (_, position), run in zip(self.sent[engine], alone.runs, strict=True):
            self.runs[position] = run

    def _report(self, now_ms: float) -> None:
        """Report first tokens and ends up to now to the router, in order."""
        events = []
        for number, position in enumerate(self.numbers):
            run = self.runs[position]
            if run.ttft_ms is not None:
                events.append((run.arrival_ms + run.ttft_ms, position, "first token", number))
            events.append((run.arrival_ms + (run.e2e_ms or 0.0), position, "the end", number))
        for at_ms, position, event, number in sorted(events):
            if at_ms > now_ms or (position, event) in self.reported:
                continue
            self.reported.add((position, event))
            if event == "first token":
                self.router.first_token(number)
            else:
                self.router.ended(number, at_ms / 1e3)

    def _request(self, position: int, at_ms: float) -> RoutedRequest:
        arrival, block_size = self.arrivals[position], self.engines[0].config.block_size
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
