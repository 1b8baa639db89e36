"""Simulation of a trace on one engine, in this process and as a command."""

import sys
import tempfile
from math import isnan
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from scripts.simbench.timing import Figures, measure_command
from sim.engine.run import run_engine
from sim.latency.modelfile import Model, save_model
from sim.workload.arrivals import plan_arrivals
from tracefile.files.reading import load_trace


def bench_hour(trace: Path, model: Model, runs: int) -> Figures:
    """Measure the simulation of requests in memory, with the noise of every scheduler step; return times and counts."""
    meta, records = load_trace(trace)
    arrivals = plan_arrivals(meta, records, model.engine.block_size)
    walls, cpus = [], []
    for _ in range(2 * runs + 1):
        wall, cpu = perf_counter(), process_time()
        run = run_engine(arrivals, model.engine, model, 0)
        walls.append(perf_counter() - wall)
        cpus.append(process_time() - cpu)
    requests = run.results.requests()
    ttfts_ms = [request.ttft_ms for request in requests if not isnan(request.ttft_ms)]
    return {
        "hour_run_wall_s": round(median(walls[1:]), 4),
        "hour_run_cpu_s": round(median(cpus[1:]), 4),
        # New memory pages cost time in most runs: the minimum has none.
        "hour_run_least_cpu_s": round(min(cpus), 4),
        "requests": len(arrivals),
        "steps": run.steps,
        "hit_tokens": sum(max(int(request.cached_tokens), 0) for request in requests),
        "preemptions": run.preemptions,
        "mean_ttft_ms": round(sum(ttfts_ms) / max(len(ttfts_ms), 1), 3),
    }


def bench_command(trace: Path, model: Model, runs: int) -> Figures:
    """Measure ``sim run`` as a command, from file to file."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model.json")
        command = [sys.executable, "-m", "sim", "run", str(trace), "--latency-model", f"{folder}/model.json"]
        return measure_command("command", runs, [*command, "-o", f"{folder}/out.jsonl", "--overwrite"])
