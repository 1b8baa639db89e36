"""How long the simulator takes for a trace: the compiled engine warm, a cold ``sim run``, the whole size curve.

    python scripts/bench_sim.py mooncake/conversation_trace.jsonl --blocks 10000 --json

The engine's step times are those of no engine in particular: one that keeps up with an hour of that trace. Wall and CPU
time are medians over ``--runs``; the cold command is the fastest of as many, its compiled code being on disk.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from sim.compiled import build_world, read_simulation, run_world
from sim.config import EngineConfig
from sim.curve import hit_curve, read_accesses
from sim.engine import Engine
from sim.latency import FrontendModel, StepModel
from sim.model import Model, make_model, save_model
from sim.noise import LEVELS, Noise
from sim.workload import plan_arrivals
from tracefile import load_trace

STEP = StepModel(
    t0_ms=6.0, per_prefill_token_ms=0.02, per_attention_token2_ms=1e-7, per_decode_ms=0.02, per_kv_token_ms=2e-6
)
FRONTEND = FrontendModel(f0_ms=2.0, f1_ms_per_prompt_token=0.0005)
SPREAD = tuple(0.02 * (place - len(LEVELS) // 2) for place in range(len(LEVELS)))

Figures = dict[str, float]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How long the simulator takes for a trace.")
    parser.add_argument("trace", type=Path, help="a trace with block hashes")
    parser.add_argument("--blocks", type=int, default=10_000, help="usable blocks (default 10000)")
    parser.add_argument("--block-size", type=int, help="tokens per block (default: the trace's)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--sync", action="store_true", help="synchronous scheduling instead of composing ahead")
    parser.add_argument("--runs", type=int, default=5, help="of each measurement (default 5)")
    parser.add_argument("--plain", action="store_true", help="run the plain Python engine too, and compare every token")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def measure(name: str, runs: int, work: Callable[[], object]) -> Figures:
    """Median wall and CPU seconds of ``work``, which has run once before."""
    work()
    walls, cpus = [], []
    for _ in range(runs):
        wall, cpu = perf_counter(), process_time()
        work()
        walls.append(perf_counter() - wall)
        cpus.append(process_time() - cpu)
    return {f"{name}_wall_s": round(median(walls), 4), f"{name}_cpu_s": round(median(cpus), 4)}


def bench_engine(arguments: argparse.Namespace, model: Model) -> Figures:
    """The compiled engine in this process: laying out, running, reading; and what it counted."""
    meta, records = load_trace(arguments.trace)
    arrivals = plan_arrivals(meta, records, model.engine.block_size)
    figures = measure("layout", arguments.runs, lambda: build_world(arrivals, model.engine, model))
    figures |= measure("layout_with_noise", arguments.runs, lambda: build_world(arrivals, model.engine, model, 0))
    walls, cpus = [], []
    for _ in range(arguments.runs + 1):
        world = build_world(arrivals, model.engine, model, 0)  # a run uses its world up
        wall, cpu = perf_counter(), process_time()
        world = run_world(world)
        walls.append(perf_counter() - wall)
        cpus.append(process_time() - cpu)
    figures |= {"engine_wall_s": round(median(walls[1:]), 4), "engine_cpu_s": round(median(cpus[1:]), 4)}
    figures |= measure("reading", arguments.runs, lambda: read_simulation(arrivals, world))
    simulation = read_simulation(arrivals, world)
    ttfts = [flight.ttft_ms for flight in simulation.flights if flight.ttft_ms is not None]
    figures |= {
        "requests": len(arrivals),
        "steps": len(simulation.timeline),
        "output_tokens": sum(len(flight.token_steps) for flight in simulation.flights),
        "hit_tokens": simulation.prefix.hit_tokens,
        "preemptions": simulation.preemptions,
        "mean_ttft_ms": round(sum(ttfts) / max(len(ttfts), 1), 3),
    }
    if arguments.plain:
        start = process_time()
        plain = Engine(arrivals, model.engine, model, seed=0).run()
        figures["plain_cpu_s"] = round(process_time() - start, 2)
        figures["differing_requests"] = sum(
            (one.ttft_ms, one.e2e_ms, one.itl_ms.tolist()) != (other.ttft_ms, other.e2e_ms, other.itl_ms.tolist())
            for one, other in zip(plain.flights, simulation.flights, strict=True)
        )
    return figures


def bench_curve(arguments: argparse.Namespace) -> Figures:
    """Every cache size in one pass, from prompts in memory."""
    accesses = read_accesses(arguments.trace, arguments.block_size)
    return measure("curve", arguments.runs, lambda: hit_curve(accesses))


def bench_command(arguments: argparse.Namespace, model: Model) -> Figures:
    """``sim run`` as a command, reading and writing files; the first one, which may compile, does not count."""
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model.json")
        command = [sys.executable, "-m", "sim", "run", str(arguments.trace), "--model", f"{folder}/model.json"]
        for _ in range(arguments.runs + 1):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
            subprocess.run(
                [*command, "-o", f"{folder}/out.jsonl", "--overwrite"], check=True, stdout=subprocess.DEVNULL
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            walls.append(perf_counter() - start)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {
        "command_wall_s": round(min(walls[1:]), 3),
        "command_cpu_s": round(min(cpus[1:]), 3),
        "command_rss_mib": round(after.ru_maxrss / 1024),
    }


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    meta, _ = load_trace(arguments.trace)
    config = EngineConfig(
        num_gpu_blocks=arguments.blocks + 1,
        block_size=arguments.block_size or meta.block_size or 16,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        async_scheduling=not arguments.sync,
    )
    noise = Noise(ttft_log_ratio=(SPREAD,), itl_log_ratio=SPREAD)
    model = make_model(STEP, FRONTEND, config, noise)
    figures = bench_command(arguments, model) | bench_engine(arguments, model) | bench_curve(arguments)
    figures["load_average"] = round(os.getloadavg()[0], 2)
    print(
        json.dumps(figures)
        if arguments.json
        else "\n".join(f"{name:<28}{value:>16,}" for name, value in figures.items())
    )


if __name__ == "__main__":
    main()
