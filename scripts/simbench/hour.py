"""A trace of one engine's traffic through the step loop, warm in this process and cold as a command."""

import sys
import tempfile
from pathlib import Path
from time import process_time

from scripts.simbench.timing import Figures, measure, measure_command
from sim.engine.simulation import Simulation, request_columns, simulate
from sim.latency.modelfile import Model, save_model
from sim.workload.arrivals import Arrivals, plan_arrivals
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import read_simulation
from tracefile import load_trace


def bench_hour(trace: Path, model: Model, runs: int, *, plain: bool) -> Figures:
    """Laying out; running, every TTFT and gap with its noise included; and what it counted."""
    meta, records = load_trace(trace)
    arrivals = plan_arrivals(meta, records, model.engine.block_size)
    figures, run = _bench_run("hour", arrivals, model, runs)
    simulation = read_simulation(arrivals.objects(), run, model.engine.block_size)
    ttfts = [request_run.ttft_ms for request_run in simulation.runs if request_run.ttft_ms is not None]
    figures |= {
        "requests": len(arrivals),
        "steps": len(simulation.timeline),
        "output_tokens": sum(len(request_run.token_steps) for request_run in simulation.runs),
        "hit_tokens": simulation.prefix.hit_tokens,
        "preemptions": simulation.preemptions,
        "mean_ttft_ms": round(sum(ttfts) / max(len(ttfts), 1), 3),
    }
    if plain:
        start = process_time()
        oracle = Engine(arrivals.objects(), model.engine, model, seed=0).run()
        figures["plain_cpu_s"] = round(process_time() - start, 2)
        figures["differing_requests"] = sum(
            (one.ttft_ms, one.e2e_ms, one.itl_ms.tolist()) != (other.ttft_ms, other.e2e_ms, other.itl_ms.tolist())
            for one, other in zip(oracle.runs, simulation.runs, strict=True)
        )
    return figures


def _bench_run(name: str, arrivals: Arrivals, model: Model, runs: int) -> tuple[Figures, Simulation]:
    """Measure laying columns out, and a run of them, each request made an object of included."""
    figures = measure(f"{name}_layout", runs, lambda: request_columns(arrivals, model.engine.block_size))
    columns = request_columns(arrivals, model.engine.block_size)
    figures |= measure(f"{name}_run", 2 * runs, lambda: simulate(arrivals, model.engine, model, 0, columns=columns))
    return figures, simulate(arrivals, model.engine, model, 0, keeps_rows=True)


def bench_command(trace: Path, model: Model, runs: int) -> Figures:
    """``sim run`` as a command, reading and writing files."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model.json")
        command = [sys.executable, "-m", "sim", "run", str(trace), "--latency-model", f"{folder}/model.json"]
        return measure_command("command", runs, [*command, "-o", f"{folder}/out.jsonl", "--overwrite"])
