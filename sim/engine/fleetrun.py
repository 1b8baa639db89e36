"""A fleet's part of ``sim run``: its simulation, and its summary by engine."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from measure.table import table_lines
from measure.wording import NOTHING
from sim.engine.deployment import Deployment
from sim.engine.dispatch import AdapterLoad, Dispatch, RoutedLoad
from sim.engine.fleet import FleetEngine
from sim.engine.fleetplan import (
    CAPTURED,
    LONE_ROUTE,
    NO_ADAPTER_FLEET,
    FleetPlan,
    deployed,
    engines_of,
    fleet_plan,
    run_fleet,
    workers_plan,
)
from sim.engine.incidents import settings_of
from sim.engine.results import RequestResult
from sim.engine.steplog import StepLog
from sim.engine.tiers import TierTraffic
from sim.latency.modelfile import Model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

MOST_EVENTS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class EngineShare:
    """An engine's share of the requests."""

    name: str
    requests: int
    hit_rate: float
    p50_ms: float | None
    """Of TTFT; None: no first token."""
    p90_ms: float | None


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """A fleet's run in a few lines."""

    route: str
    engines: list[EngineShare]
    events: list[tuple[float, str, str]]
    """Time in s from the first arrival, what happened, and the engine."""
    not_served: dict[str, int]
    """Requests that failed by the fleet, by error."""


def asks_fleet(arguments: argparse.Namespace, models: Sequence[Model]) -> bool:
    """Return whether the flags ask for several engines or a router. Raises InputError for what a fleet has not."""
    asked = bool(arguments.route is not None or arguments.event or arguments.replicas not in (None, "1"))
    if arguments.max_loras < 1:
        raise InputError(f"--max-loras: {arguments.max_loras}; expected 1 or more")
    if arguments.adapter_load and (not asked or arguments.route == CAPTURED):
        raise InputError(NO_ADAPTER_FLEET)
    routed = arguments.route not in (None, CAPTURED) and not arguments.prefill_workers
    if routed and arguments.replicas is None and not (arguments.event or arguments.adapter_load):
        raise InputError(f"--route: {LONE_ROUTE}")
    if not asked and len(models) > 1:
        raise InputError(f"--latency-model: {len(models)} models for one engine; expected --replicas {len(models)}")
    return asked


@dataclass(frozen=True, slots=True)
class DeployedRun:
    """A run's engines as they are deployed, and its noise."""

    config_of: Callable[[Model], EngineConfig]
    deployment: Deployment
    seed: int | None


def simulate_fleet(
    arguments: argparse.Namespace,
    arrivals: Arrivals,
    models: Sequence[Model],
    run: DeployedRun,
    *,
    open_logs: Callable[[Sequence[FleetEngine]], AbstractContextManager[Sequence[StepLog]]],
) -> "FleetRun":
    """Run ``arrivals`` through the fleet that the flags ask for, with logs of the engines' steps or none."""
    load = RoutedLoad(arrivals, run.config_of(models[0]).block_size)
    workers = run.deployment.workers
    if workers and arguments.adapter_load:
        raise InputError("--adapter-load: not simulated with prefill and decode workers; expected one of the two")
    plan = (
        workers_plan(run.deployment, arguments.route, arguments.replicas, arguments.event)
        if workers
        else fleet_plan(arguments.replicas, arguments.route, arguments.event, lambda: load.upstreams)
    )
    assert plan is not None
    plan = replace(plan, adapters=AdapterLoad(arguments.max_loras, 1e3 * arguments.adapter_load))
    engines = deployed(
        [replace(one, model=run.deployment.model(one.model)) for one in engines_of(plan, models, run.config_of)],
        run.deployment,
    )
    with open_logs(engines) as logs:
        return FleetRun(plan, engines, run_fleet(arrivals, load, engines, plan, run.seed, logs=logs))


class FleetRun:
    """A fleet's run that has ended."""

    def __init__(self, plan: FleetPlan, engines: Sequence[FleetEngine], dispatch: Dispatch) -> None:
        self._plan, self._engines, self._dispatch = plan, engines, dispatch

    @property
    def block_size(self) -> int:
        return self._engines[0].config.block_size

    @property
    def preemptions(self) -> int:
        return sum(int(life.state.clock["preemptions"][0]) for life in self._dispatch.fleet.lives)

    @property
    def engine_steps(self) -> int:
        return sum(life.engine_steps for life in self._dispatch.fleet.lives)

    @property
    def traffic(self) -> TierTraffic:
        return self._dispatch.fleet.traffic

    def meta(self) -> dict[str, Any]:
        """Return settings that decided the run besides one engine's settings."""
        return {
            "engines": list(self._plan.names),
            "route": self._plan.route,
            "events": [settings_of(event) for event in self._plan.events],
        }

    def results(self) -> Iterator[RequestResult]:
        return self._dispatch.fleet.results()

    def summary(self, records: Sequence[Record]) -> FleetSummary:
        first_ms = float(self._dispatch.fleet.arrivals.arrival_ms.min(initial=np.inf))
        events = [
            ((at_ms - first_ms) / 1e3, what, self._engines[engine].name) for at_ms, what, engine in self._dispatch.log
        ]
        failed = Counter(one.error for one in records if one.error in ("no_engine", "engine_died"))
        return FleetSummary(
            route=self._plan.route,
            engines=[_share(engine.name, records) for engine in self._engines],
            events=events,
            not_served={str(error): count for error, count in sorted(failed.items(), key=str)},
        )


def _share(name: str, records: Sequence[Record]) -> EngineShare:
    own = [record for record in records if record.upstream == name]
    ttft_ms = [record.ttft_ms for record in own if record.ttft_ms is not None]
    prompt = sum(record.prompt_tokens or 0 for record in own if record.cached_tokens is not None)
    cached = sum(record.cached_tokens or 0 for record in own)
    levels = np.quantile(ttft_ms, (0.5, 0.9), method="inverted_cdf").tolist() if ttft_ms else (None, None)
    return EngineShare(name, len(own), cached / prompt if prompt else 0.0, *levels)


def fleet_lines(fleet: FleetSummary) -> list[str]:
    """Return a fleet's summary as lines of a terminal."""
    rows = [
        [one.name, str(one.requests), f"{one.hit_rate:.1%}", *(_shown_ms(ms) for ms in (one.p50_ms, one.p90_ms))]
        for one in fleet.engines
    ]
    lines = table_lines([f"engine ({fleet.route})", "n", "cached", "TTFT p50", "p90"], rows, "<", gap="    ")
    for at_s, what, name in fleet.events[:MOST_EVENTS_SHOWN]:
        lines.append(f"at {at_s:,.1f} s engine {name}: {what}")
    if len(fleet.events) > MOST_EVENTS_SHOWN:
        lines.append(f"… and {len(fleet.events) - MOST_EVENTS_SHOWN} events more")
    for error, count in fleet.not_served.items():
        lines.append(f"{count} requests failed: {error}")
    return lines


def _shown_ms(ms: float | None) -> str:
    return NOTHING if ms is None else f"{ms:.1f}"
