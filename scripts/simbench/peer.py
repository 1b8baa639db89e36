"""Dynamo's replay beside ours: the same trace, pool, token budget, sequences and step times."""

import json
import subprocess
from pathlib import Path

from scripts.simbench.caches import pool_hits, read_batch
from scripts.simbench.timing import Figures, measure
from sim.engine.run import roots_of
from sim.engine.simstate import build_state
from sim.kernels.layout import SimState
from sim.kernels.loop import run_state
from sim.latency.modelfile import Model, make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivalorder import in_parts
from sim.workload.arrivals import BatchPlan, plan_arrivals
from sim.workload.chain import Chains
from tests.sim.oracles.simulation import read_simulation
from tracefile import load_trace, open_trace

SCRIPT = Path(__file__).with_name("dynamoreplay.py")
STEP_MS, PREFILL_STEP_MS = 8.0, 40.0


def bench_peer(python: Path, trace: Path, engine: EngineConfig, runs: int) -> Figures:
    """Loaded: the trace's arrivals, steps of fixed times (``timing_model`` fixed: 40 ms for a step's prefills, 8 ms for
    its decodes), so that scheduling and caching decide, not a model of kernels. Then one request at a time."""
    settings: dict[str, object] = {
        "num_gpu_blocks": engine.usable_blocks,  # Dynamo's pool has no null block
        "block_size": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "timing_model": {"type": "fixed", "prefill_ms": PREFILL_STEP_MS, "decode_ms": STEP_MS},
    }
    theirs = min((_replay(python, trace, settings, 0) for _ in range(runs)), key=lambda found: found["wall_s"])
    alone = _replay(python, trace, settings, 1)
    figures = {f"dynamo_{name}": value for name, value in theirs.items()}
    figures["dynamo_alone_hit_tokens"] = alone["hit_tokens"]
    return figures | _ours(trace, engine, runs)


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


def _run_file(trace: Path, engine: EngineConfig, model: Model) -> SimState:
    with open_trace(trace) as reader:
        plan = BatchPlan(Chains(reader.meta, engine.block_size), trace)
        batches, order = roots_of(reader, trace)
        first, *others = [part.arrivals for part in in_parts(plan.every(batches), order)]
    return run_state(build_state(first.followed_by(*others), engine, model))


def _replay(python: Path, trace: Path, settings: dict[str, object], concurrency: int) -> Figures:
    command = [str(python), str(SCRIPT), str(trace), json.dumps(settings), str(concurrency)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    found: Figures = json.loads(ended.stdout.splitlines()[-1])
    return found
