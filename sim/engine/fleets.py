"""A fleet of engines on one workload: laid out, and the results of the requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from measure.cache.vectors import floats
from sim.engine.deployment import Deployment
from sim.engine.fleet import NONE, Fleet, Life
from sim.engine.results import EngineResults, Results
from sim.engine.simulatedrequest import SimulatedRequest
from sim.engine.simulation import make_engine, request_columns
from sim.engine.tiers import TierTraffic, traffic_of
from sim.latency.modelfile import Model
from sim.latency.noise import frontend_factors
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import NOBODY, Arrivals
from tracefile.records.arrays import IntArray


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """An engine of a fleet."""

    name: str
    config: EngineConfig
    model: Model
    deployment: Deployment | None = None


class FleetLoad:
    """A workload on a fleet of engines."""

    def __init__(
        self, arrivals: Arrivals, engines: Sequence[FleetEngine], seed: int | None, *, keeps_rows: bool = False
    ) -> None:
        """``seed``: None without noise. ``keeps_rows``: engines keep the counts of all steps."""
        self.arrivals, self.engines, self._seed, self._keeps_rows = arrivals, engines, seed, keeps_rows
        block_size = engines[0].config.block_size
        requests = request_columns(arrivals, block_size).make(floats(np.ones(len(arrivals))))
        self._start_ms = min(float(arrivals.arrival_ms.min(initial=0.0)), 0.0)
        self.fleet = Fleet(requests, len(engines), self._cold, block_size=block_size, now_ms=self._start_ms)
        for request in requests:
            request.next_think_ms = min((child.think_ms for child in request.children), default=np.inf)
        for place in np.flatnonzero(arrivals.parents == NOBODY).tolist():
            self.fleet.submit(requests[place], requests[place].arrival_ms)

    @property
    def requests(self) -> list[SimulatedRequest]:
        """Requests as the router has them, in the order of ``arrivals``."""
        return self.fleet.requests

    def life_of(self) -> IntArray:
        """Number of the life in which each request last was; NONE: no engine got it."""
        return np.array([request.life for request in self.requests], np.int64)

    def served_in(self, life: Life) -> list[SimulatedRequest]:
        """Return the requests of a life as its engine has them."""
        return [one for request in self.requests if request.life == life.index and (one := request.served) is not None]

    def results(self) -> Results:
        """Return the results of all requests, which have ended."""
        life_of = self.life_of()
        engines = [
            self._results_in(np.flatnonzero(life_of == life.index), life, self.engines[life.number].name)
            for life in self.fleet.lives
        ]
        unserved = self._results_in(np.flatnonzero(life_of == NONE), self.fleet.lives[0], None)
        return Results(self.arrivals, [*engines, unserved], is_fleet=True)

    @property
    def traffic(self) -> TierTraffic:
        """Traffic of the memory behind the pools."""
        return traffic_of([life.engine for life in self.fleet.lives], [life.engine for life in self.fleet.current])

    def _results_in(self, places: IntArray, life: Life, upstream: str | None) -> EngineResults:
        served = []
        for place in places.tolist():
            request = self.requests[place]
            one = request.served or request
            one.outcome, one.arrival_ms, one.num_seen = request.outcome, request.arrival_ms, request.num_seen
            one.ttft_ms, one.e2e_ms = request.ttft_ms, request.e2e_ms
            served.append(one)
        return EngineResults(served, places, life.engine.seen_ms, upstream)

    def _cold(self, number: int, life: int) -> Life:
        one, count = self.engines[number], len(self.engines)
        seed = engine_seed(self._seed, number if life < count else life)
        engine = make_engine(
            one.config,
            one.model,
            seed,
            deployment=one.deployment,
            now_ms=self._start_ms,
            keeps_rows=self._keeps_rows,
        )
        return Life(number, engine, floats(frontend_factors(one.model.noise, seed, self.arrivals.ids)))


def engine_seed(seed: int | None, number: int) -> int | None:
    """Seed of an engine's noise; the first has the run's own."""
    if seed is None or number == 0:
        return seed
    sequence = np.random.SeedSequence((seed & 0xFFFFFFFFFFFFFFFF, number))
    return int(sequence.generate_state(1, np.uint64)[0])
