"""Comparison with Dynamo's replay: the same trace, block pool, token budget, sequences and step times."""

import argparse
import json
import os
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median

from scripts.simbench.timing import Figures, measure
from sim.engine.deployment import Deployment
from sim.engine.fleetplan import fleet_plan
from sim.engine.fleets import engines_of, routed_requests, run_fleet
from sim.engine.results import finished_records
from sim.engine.run import read_arrivals, run_engine
from sim.latency.modelfile import Model, make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile.files.reading import open_trace
from tracefile.records.schema import Record

SCRIPT = Path(__file__).with_name("dynamoreplay.py")
STEP_MS, PREFILL_STEP_MS = 8.0, 40.0
REPLICAS = 4
ROUTES = {"round_robin": "round-robin", "kv_router": "prefix:knowledge=complete"}
"""kvtape's policy by Dynamo's router; its KV router minimizes outstanding prefill, uncached tokens and used blocks."""


def bench_peer(python: Path, trace: Path, engine: EngineConfig, runs: int) -> Figures:
    """Replay the file with both: one engine, then four engines with a router; with a record per request and its ITLs.

    Step times are fixed (``timing_model`` fixed: 40 ms for the prefills of a step, 8 ms for its decodes), so only
    scheduling and caching matter. Dynamo selects randomly among equal engines, so two runs differ.
    """
    model = make_model({"t0_ms": STEP_MS, "prefill_step_ms": PREFILL_STEP_MS}, engine)
    figures = _bench_both("peer", python, trace, engine, {}, runs, partial(_run_engine, trace, model))
    for mode, route in ROUTES.items():
        options: dict[str, object] = {"num_workers": REPLICAS, "router_mode": mode}
        simulate = partial(_run_fleet, trace, model, route)
        figures |= _bench_both(f"fleet_{mode}", python, trace, engine, options, runs, simulate)
    return figures


def _bench_both(  # noqa: PLR0917 - arguments of both sides
    name: str,
    python: Path,
    trace: Path,
    engine: EngineConfig,
    options: dict[str, object],
    runs: int,
    simulate: "partial[tuple[int, float]]",
) -> Figures:
    replays = [_replay(python, trace, _settings(engine), options) for _ in range(runs)]
    figures = {
        f"{name}_dynamo_least_cpu_s": min(replay["cpu_s"] for replay in replays),
        f"{name}_dynamo_rss_mib": max(replay["rss_mib"] for replay in replays),
        f"{name}_dynamo_hit_tokens": median(replay["hit_tokens"] for replay in replays),
        f"{name}_dynamo_mean_ttft_ms": median(replay["mean_ttft_ms"] for replay in replays),
        **measure(name, runs, simulate),
    }
    hit_tokens, mean_ttft_ms = simulate()
    return figures | {
        f"{name}_hit_tokens": hit_tokens,
        f"{name}_mean_ttft_ms": round(mean_ttft_ms, 3),
        f"{name}_dynamo_ratio": round(figures[f"{name}_dynamo_least_cpu_s"] / figures[f"{name}_least_cpu_s"], 2),
    }


def _settings(engine: EngineConfig) -> dict[str, object]:
    return {
        "num_gpu_blocks": engine.usable_blocks,  # Dynamo's pool has no null block
        "block_size": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "timing_model": {"type": "fixed", "prefill_ms": PREFILL_STEP_MS, "decode_ms": STEP_MS},
    }


def _read(trace: Path, engine: EngineConfig) -> Arrivals:
    with open_trace(trace) as reader:
        return read_arrivals(reader, engine, argparse.Namespace(trace=trace, cold_prompts=False, replay_sessions=False))


def _run_engine(trace: Path, model: Model) -> tuple[int, float]:
    results = run_engine(_read(trace, model.engine), model.engine, model, None).results
    return _count(finished_records(results, model.engine.block_size))


def _run_fleet(trace: Path, model: Model, route: str) -> tuple[int, float]:
    arrivals, plan = _read(trace, model.engine), fleet_plan(str(REPLICAS), route, [], list)
    assert plan is not None
    engines = engines_of(plan, [model], lambda model: model.engine, Deployment())
    load = routed_requests(arrivals, model.engine.block_size)
    results = run_fleet(arrivals, load, engines, plan, None).results()
    return _count(finished_records(results, model.engine.block_size))


def _count(records: Iterable[Record]) -> tuple[int, float]:
    """Return hit tokens and mean TTFT of records; each record is built and dropped, as for writing."""
    hit_tokens, ttft_ms, count = 0, 0.0, 0
    for record in records:
        hit_tokens += record.cached_tokens or 0
        if record.ttft_ms is not None:
            ttft_ms, count = ttft_ms + record.ttft_ms, count + 1
    return hit_tokens, ttft_ms / count


def _replay(python: Path, trace: Path, settings: dict[str, object], options: dict[str, object]) -> Figures:
    command = [str(python), str(SCRIPT), str(trace), json.dumps(settings), json.dumps(options)]
    quiet = {**os.environ, "DYN_LOG": "error"}  # the router logs each decision
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=quiet)
    figures: Figures = json.loads(result.stdout.splitlines()[-1])
    return figures
