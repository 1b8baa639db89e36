"""A capture, and its load planned under a scenario: arrivals, engines, their fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from measure.number_format import coverage_text
from sim.engine import simulation
from sim.engine.deployment import Deployment
from sim.engine.fleetplan import (
    CAPTURED,
    LONE_ROUTE,
    FleetPlan,
    fleet_plan,
    upstream_names,
)
from sim.forecast.scenarios import Scenario
from sim.latency.fittraces import refuse_fitted
from sim.latency.modelfile import Model, engine_with
from sim.vllm.config import EngineConfig
from sim.vllm.kvgroups import parse_groups
from sim.vllm.settings import refuse_other_attention
from sim.workload import arrivalorder
from sim.workload import arrivals as planning
from sim.workload.arrivals import Arrivals
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

AS_DEPLOYED = Deployment()


@dataclass(frozen=True)
class Captured:
    """A trace, ready to be planned under scenarios."""

    path: Path
    digest: str
    meta: Meta
    records: Sequence[Record]
    engine: EngineConfig
    """The engine's settings: those that the trace tells or shows, else the model's."""
    paced: bool
    """Later turns wait for the outputs before them; if not, every request comes at its recorded offset."""
    planned: dict[tuple[int, bool, bool], Arrivals] = field(default_factory=dict, compare=False)
    """Arrivals as captured, by what they depend on: kept, as scenarios share them."""

    @property
    def cold(self) -> bool:
        """True if its prompts were made to share nothing, whatever hashes its records keep."""
        return bool(self.meta.workload and self.meta.workload.cold_prompts)

    @property
    def part_hashed(self) -> str:
        """Words on the requests whose hits are known, where these are too few; empty: they are not."""
        hashed = sum(record.block_hashes is not None for record in self.records)
        part = coverage_text(hashed, len(self.records), "block hashes") if hashed and not self.cold else ""
        return f"hits are {part} and share nothing here" if part else ""

    @cached_property
    def upstreams(self) -> list[str]:
        """Servers of the capture."""
        return upstream_names(record.upstream for record in self.records)


@dataclass(frozen=True, slots=True)
class Load:
    """A scenario's planned arrivals and engine."""

    scenario: Scenario
    arrivals: Arrivals
    engine: EngineConfig
    fleet: FleetPlan | None = None
    """None: one engine."""
    deployment: Deployment = AS_DEPLOYED

    @property
    def most_blocks(self) -> int:
        """Different blocks that the load can ever fill, and a partial one of each request."""
        arrivals = self.arrivals
        private = int((arrivals.full_blocks - arrivals.hashed_blocks).sum())
        return len(np.unique(arrivals.hashes)) + private + int(arrivals.runs.sum())

    @property
    def serves(self) -> bool:
        """True if an engine can serve some request that waits for no other, or the capture tells its end."""
        roots = self.arrivals.select(np.flatnonzero(self.arrivals.parents == planning.NOBODY))
        return not roots.runs.all() or bool(simulation.servable(roots, self.engine).any())


def read_captured(path: Path, model: Model) -> Captured:
    """Read a trace that the model was not fitted on."""
    digest, (meta, records) = trace_digest(path), load_trace(path)
    refuse_fitted(model.fitted_on, path, digest, records)
    fitted = model.engine
    if fitted.kv_groups is None:
        refuse_other_attention(meta, path, "a model of sim calibrate --kv-groups")
    if not records:
        raise InputError(f"{path}: no records; expected at least one request")
    if paced := _was_paced(meta, records):
        records = arrivalorder.linked_records(meta, records, path)
    return Captured(path, digest, meta, records, captured_engine(fitted, meta, records), paced)


def captured_engine(fitted: EngineConfig, meta: Meta, records: Sequence[Record]) -> EngineConfig:
    """Return the settings told, else ``fitted``; blocks and the longest request at least as the trace has them."""
    settings = {name: getattr(meta.engine, name, None) for name in EngineConfig.__dataclass_fields__}
    settings["block_size"] = settings["block_size"] if fitted.kv_groups is None else fitted.block_size
    engine = engine_with(fitted, settings)
    if meta.block_size is not None and settings["block_size"] is None and engine.block_size % meta.block_size:
        blocks = {"num_gpu_blocks": settings["num_gpu_blocks"]} if settings["num_gpu_blocks"] else {}
        engine = engine_with(engine, _same_memory(engine, {"block_size": meta.block_size, **blocks}))
    served = (record for record in records if record.status == "ok")
    longest = max((record.context_tokens() for record in served), default=0)
    if settings["max_model_len"] is None and longest > (engine.max_model_len or longest):
        engine = engine_with(engine, {"max_model_len": longest})
    return engine


def plan_as(name: str, captured: Captured, scenario: Scenario) -> Load:
    """Plan as ``plan`` does; its InputError begins with ``name``."""
    try:
        return plan(captured, scenario)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def plan(captured: Captured, scenario: Scenario) -> Load:
    """Plan the capture's load under ``scenario``. Raises InputError naming a setting that no engine could have."""
    engine, fleet, deployment = engines_asked(captured, scenario)
    cold = scenario.cold_prompts or captured.cold
    key = (engine.block_size, cold, engine.enable_prefix_caching)
    if key not in captured.planned:
        captured.planned[key] = planning.plan_arrivals(
            captured.meta,
            list(captured.records),
            engine.block_size,
            path=str(captured.path),
            cold_prompts=cold,
            replay_sessions=captured.paced,
            needs_hashes=engine.enable_prefix_caching,
        )
    arrivals = at_rate(captured.planned[key], scenario.rate)
    deployment.require_host_capacity(arrivals, engine.block_size)
    return Load(scenario, arrivals, engine, fleet, deployment)


def engines_asked(captured: Captured, scenario: Scenario) -> tuple[EngineConfig, FleetPlan | None, Deployment]:
    """Return the settings of a scenario's engines, their fleet (the capture's unless others are asked), and layout."""
    deployment = Deployment(**scenario.deployment)
    engine = engine_with(captured.engine, _same_memory(captured.engine, scenario.settings))
    deployment.check(engine)
    upstreams, route, replicas = captured.upstreams, scenario.route, scenario.replicas
    if replicas is None and len(upstreams) > 1:
        if route in (None, CAPTURED) and not scenario.events:
            return engine, FleetPlan(tuple(upstreams), CAPTURED), deployment
        replicas = len(upstreams)
    if replicas is None and route not in (None, CAPTURED) and not scenario.events:
        raise InputError(f"--route: {LONE_ROUTE}")
    pools = None if replicas is None else str(replicas)
    return engine, fleet_plan(pools, route, scenario.events, lambda: upstreams), deployment


def at_rate(arrivals: Arrivals, rate: float) -> Arrivals:
    """Divide offsets from the first arrival by ``rate``; think times stay."""
    if rate == 1.0:
        return arrivals
    first_ms = arrivals.arrival_ms.min()
    return replace(arrivals, arrival_ms=first_ms + (arrivals.arrival_ms - first_ms) / rate)


def _was_paced(meta: Meta, records: Sequence[Record]) -> bool:
    """True where there are sessions, unless a replay sent every request at its recorded time."""
    at_recorded_times = meta.workload is not None and meta.workload.pattern == "replay"
    return not at_recorded_times and any(record.parent_id is not None for record in records)


def _same_memory(engine: EngineConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with as many blocks of another size as the memory holds, unless they are given."""
    if settings.get("kv_groups") is not None:
        return {**settings, "block_size": parse_groups(settings["kv_groups"]).match_unit}
    size = settings.get("block_size") or 0
    if size < 1 or "num_gpu_blocks" in settings:
        return dict(settings)
    return {**settings, "num_gpu_blocks": engine.usable_blocks * engine.block_size // size + 1}
