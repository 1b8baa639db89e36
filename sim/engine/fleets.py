"""A fleet of engines on one workload: laid out, and the results of the requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from measure.cache.vectors import floats
from sim.engine.deployment import Deployment
from sim.engine.dispatch import Dispatch, Routed
from sim.engine.fleet import NONE, Fleet, Life
from sim.engine.results import EngineResults, Results
from sim.engine.simulatedrequest import SimulatedRequest
from sim.engine.simulation import make_engine, request_columns
from sim.engine.tiers import TierTraffic, traffic_of
from sim.latency.modelfile import Model
from sim.latency.noise import frontend_factors
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile.records.arrays import IntArray


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """An engine of a fleet."""

    name: str
    config: EngineConfig
    model: Model
    deployment: Deployment | None = None


def routed_requests(arrivals: Arrivals, block_size: int) -> list[Routed]:
    """Return the requests of a workload as a router sees them."""
    starts = np.cumsum(arrivals.known) - arrivals.known
    ends = starts + np.minimum(arrivals.known, arrivals.prompt_tokens // block_size)
    limits, turns = (
        _in_order(arrivals, [source.numbers(name).tolist() for source in arrivals.sources])
        for name in ("max_tokens", "turn")
    )
    sessions = _in_order(arrivals, [source.words("session_id") for source in arrivals.sources])
    columns = (sessions, starts.tolist(), ends.tolist(), arrivals.prompt_tokens.tolist(), limits, turns)
    keys, block_tokens = arrivals.hashes.data, float(block_size)
    return [
        (word if word is None else word.encode(), keys[start:end], block_tokens, tokens, limit or None, turn or None)
        for word, start, end, tokens, limit, turn in zip(*columns, strict=True)
    ]


def upstreams_of(arrivals: Arrivals) -> list[str | None]:
    """Return the server of each request in the capture."""
    return _in_order(arrivals, [source.words("upstream") for source in arrivals.sources])


def _in_order(arrivals: Arrivals, columns: list[Any]) -> list[Any]:
    """Return a field of the requests; ``columns``: that of each source."""
    return [columns[source][row] for source, row in zip(arrivals.source.tolist(), arrivals.rows.tolist(), strict=True)]


class FleetLoad:
    """A workload on a fleet of engines, and its run under a router: ``dispatch``."""

    dispatch: Dispatch

    def __init__(
        self, arrivals: Arrivals, engines: Sequence[FleetEngine], seed: int | None, *, keeps_rows: bool = False
    ) -> None:
        """``seed``: None without noise. ``keeps_rows``: engines keep the counts of all steps."""
        self.arrivals, self.engines = arrivals, engines
        block_size = engines[0].config.block_size
        requests = request_columns(arrivals, block_size).make(floats(np.ones(len(arrivals))))
        start_ms = min(float(arrivals.arrival_ms.min(initial=0.0)), 0.0)
        make_life = partial(_make_life, arrivals.ids, engines, seed, start_ms, keeps_rows)
        self.fleet = Fleet(requests, len(engines), make_life, block_size=block_size, now_ms=start_ms)

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
        served = [self.requests[place].as_served() for place in places.tolist()]
        return EngineResults(served, places, life.engine.seen_ms, upstream)


def _make_life(  # noqa: PLR0917 - one for each side's need
    ids: list[str],
    engines: Sequence[FleetEngine],
    seed: int | None,
    start_ms: float,
    keeps_rows: bool,
    number: int,
    life: int,
) -> Life:
    """Return the life of that number in a fleet, of its engine ``number``. ``ids``: of all requests."""
    one = engines[number]
    seed = engine_seed(seed, number if life < len(engines) else life)
    engine = make_engine(one.config, one.model, seed, deployment=one.deployment, now_ms=start_ms, keeps_rows=keeps_rows)
    return Life(number, engine, floats(frontend_factors(one.model.noise, seed, ids)))


def engine_seed(seed: int | None, number: int) -> int | None:
    """Seed of an engine's noise; the first has the run's own."""
    if seed is None or number == 0:
        return seed
    sequence = np.random.SeedSequence((seed & 0xFFFFFFFFFFFFFFFF, number))
    return int(sequence.generate_state(1, np.uint64)[0])
