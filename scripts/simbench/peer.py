"""Dynamo's replay beside ours: the same trace, pool, token budget, sequences and step times."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from scripts.simbench.caches import pool_hits, read_batch
from scripts.simbench.timing import Figures, measure
from sim.engine.dispatch import Dispatch, RoutedLoad
from sim.engine.fleetplan import engines_of, fleet_plan, run_fleet
from sim.engine.run import roots_of
from sim.engine.simstate import build_state
from sim.kernels.layout import SimState
from sim.kernels.loop import run_state
from sim.latency.modelfile import Model, make_model, save_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivalorder import in_parts
from sim.workload.arrivals import Arrivals, BatchPlan, plan_arrivals
from sim.workload.chain import Chains
from tests.sim.oracles.simulation import read_simulation
from tracefile import load_trace, open_trace

SCRIPT = Path(__file__).with_name("dynamoreplay.py")
STEP_MS, PREFILL_STEP_MS = 8.0, 40.0
REPLICAS = 4


def bench_peer(python: Path, trace: Path, engine: EngineConfig, runs: int) -> Figures:
    """Loaded: the trace's arrivals, steps of fixed times (``timing_model`` fixed: 40 ms for a step's prefills, 8 ms for
    its decodes), so that scheduling and caching decide, not a model of kernels. Then one request at a time."""
    settings = _settings(engine)
    theirs = min((_replay(python, trace, settings, {}) for _ in range(runs)), key=lambda found: found["wall_s"])
    alone = _replay(python, trace, settings, {"replay_concurrency": 1})
    figures = {f"dynamo_{name}": value for name, value in theirs.items()}
    figures["dynamo_alone_hit_tokens"] = alone["hit_tokens"]
    return figures | _ours(trace, engine, runs)


def bench_fleet(python: Path, trace: Path, engine: EngineConfig, runs: int) -> Figures:
    """Four engines behind Dynamo's routers and behind the same rules of ours.

    Its KV router sends a request where prefill outstanding, uncached prompt and blocks in use are least, by the
    engines' events, and of equals to any, so that two runs differ. Ours, ``overlap``, takes equals in turn.
    """
    model = make_model({"t0_ms": STEP_MS, "prefill_step_ms": PREFILL_STEP_MS}, engine)
    figures: Figures = {}
    for mode, route in (("round_robin", "round-robin"), ("kv_router", "overlap:knowledge=complete")):
        options: dict[str, object] = {"num_workers": REPLICAS, "router_mode": mode}
        theirs = [_replay(python, trace, _settings(engine), options) for _ in range(max(runs, 2))]
        hits = [found["hit_tokens"] for found in theirs]
        ours = measure(f"fleet_{mode}", runs, partial(_run_fleet, trace, model, route))
        run = _run_fleet(trace, model, route)
        ended = list(run.fleet.results())
        ttfts_ms = [one.ttft_ms for one in ended if one.ttft_ms is not None]
        least_cpu_s = min(found["cpu_s"] for found in theirs)
        figures |= {
            f"fleet_{mode}_dynamo_least_hit_tokens": min(hits),
            f"fleet_{mode}_dynamo_most_hit_tokens": max(hits),
            f"fleet_{mode}_dynamo_mean_ttft_ms": round(median(found["mean_ttft_ms"] for found in theirs), 3),
            f"fleet_{mode}_dynamo_least_cpu_s": least_cpu_s,
            **ours,
            f"fleet_{mode}_hit_tokens": sum(one.cached_tokens or 0 for one in ended),
            f"fleet_{mode}_mean_ttft_ms": round(sum(ttfts_ms) / len(ttfts_ms), 3),
            f"fleet_{mode}_identical_again": float(_predicted_twice(trace, model, route)),
            f"fleet_{mode}_dynamo_over_ours": round(least_cpu_s / ours[f"fleet_{mode}_cpu_s"], 3),
        }
    return figures


def _run_fleet(trace: Path, model: Model, route: str) -> Dispatch:
    arrivals = _read(trace, model.engine)
    plan = fleet_plan(str(REPLICAS), route, [], list)
    assert plan is not None
    engines = engines_of(plan, [model], lambda one: one.engine)
    return run_fleet(arrivals, RoutedLoad(arrivals, model.engine.block_size), engines, plan, None)


def _predicted_twice(trace: Path, model: Model, route: str) -> bool:
    """Return whether ``sim run`` writes the same bytes twice."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model.json")
        command = [sys.executable, "-m", "sim", "run", str(trace), "--latency-model", f"{folder}/model.json"]
        command += ["--replicas", str(REPLICAS), "--route", route, "--overwrite", "-o", f"{folder}/out.jsonl"]
        digests = set()
        for _ in range(2):
            subprocess.run(command, check=True, capture_output=True)
            digests.add(hashlib.sha256(Path(folder, "out.jsonl").read_bytes()).digest())
    return len(digests) == 1


def _ours(trace: Path, engine: EngineConfig, runs: int) -> Figures:
    """The same from the file: reading, running, every TTFT and gap."""
    model = make_model({"t0_ms": STEP_MS, "prefill_step_ms": PREFILL_STEP_MS}, engine)
    meta, records = load_trace(trace)
    arrivals = plan_arrivals(meta, records, engine.block_size)
    figures = measure("peer_from_file", runs, lambda: _run_file(trace, engine, model))
    figures |= measure("peer_from_memory", runs, lambda: run_state(build_state(arrivals, engine, model)))
    simulation = read_simulation(arrivals.objects(), run_state(build_state(arrivals, engine, model)))
    ttfts_ms = [request_run.ttft_ms for request_run in simulation.runs if request_run.ttft_ms is not None]
    return figures | {
        "peer_hit_tokens": simulation.prefix.hit_tokens,
        "peer_mean_ttft_ms": round(sum(ttfts_ms) / len(ttfts_ms), 3),
        "peer_alone_hit_tokens": pool_hits(read_batch(trace)[0], engine.usable_blocks) * engine.block_size,
    }


def _settings(engine: EngineConfig) -> dict[str, object]:
    return {
        "num_gpu_blocks": engine.usable_blocks,  # Dynamo's pool has no null block
        "block_size": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "timing_model": {"type": "fixed", "prefill_ms": PREFILL_STEP_MS, "decode_ms": STEP_MS},
    }


def _run_file(trace: Path, engine: EngineConfig, model: Model) -> SimState:
    return run_state(build_state(_read(trace, engine), engine, model))


def _read(trace: Path, engine: EngineConfig) -> Arrivals:
    with open_trace(trace) as reader:
        plan = BatchPlan(Chains(reader.meta, engine.block_size), trace)
        batches, order = roots_of(reader, trace)
        first, *others = [part.arrivals for part in in_parts(plan.every(batches), order)]
    return first.followed_by(*others)


def _replay(python: Path, trace: Path, settings: dict[str, object], options: dict[str, object]) -> Figures:
    command = [str(python), str(SCRIPT), str(trace), json.dumps(settings), json.dumps(options)]
    quiet = {**os.environ, "DYN_LOG": "error"}  # its router logs each choice
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env=quiet)
    found: Figures = json.loads(ended.stdout.splitlines()[-1])
    return found
