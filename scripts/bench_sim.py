"""Run times of the simulator: an hour of traffic warm and cold, the pool and a plain LRU at two block sizes, the
whole size curve, and a made-up million requests.

    python -m scripts.bench_sim mooncake/conversation_trace.jsonl --million 1000000 --markdown

The engine's step times are those of no engine in particular: one that keeps up with an hour of that trace. Figures in
seconds are medians over ``--runs``; a command's are those of its fastest, its compiled code being on disk.
"""

import argparse
import gc
import json
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from scripts.simbench.caches import bench_caches
from scripts.simbench.hour import FINE_PARTS, bench_command, bench_fine_hour, bench_hour
from scripts.simbench.million import bench_million
from scripts.simbench.timing import Figures
from sim.latency.modelfile import make_model
from sim.latency.noise import LEVELS, Noise
from sim.vllm.config import EngineConfig
from tracefile import load_trace

COSTS = {
    "t0_ms": 6.0,
    "per_prefill_token_ms": 0.02,
    "per_attention_token2_ms": 1e-7,
    "per_decode_ms": 0.02,
    "per_kv_token_ms": 2e-6,
    "frontend_base_ms": 2.0,
    "frontend_ms_per_prompt_token": 0.0005,
}
SPREAD = tuple(0.02 * (place - len(LEVELS) // 2) for place in range(len(LEVELS)))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How long the simulator takes.")
    parser.add_argument("trace", type=Path, help="a trace with block hashes")
    parser.add_argument("--blocks", type=int, default=10_000, help="usable blocks (default 10000)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--sync", action="store_true", help="synchronous scheduling instead of composing ahead")
    parser.add_argument("--runs", type=int, default=5, help="of each measurement (default 5)")
    parser.add_argument("--plain", action="store_true", help="run the plain Python engine too, and compare every token")
    parser.add_argument("--million", type=int, default=0, metavar="N", help="make up and run N requests")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print a table")
    return parser.parse_args()


def ratios(figures: Figures) -> Figures:
    """Ratios of the figures, in CPU seconds."""
    ends = (name.removesuffix("_blocks") for name in figures if name.endswith("_blocks") and "_hit_" not in name)
    caches = [name for name in ends if name.startswith("pool_")]
    found = {
        f"{name}_million_blocks_per_s": figures[f"{name}_blocks"] / figures[f"{name}_cpu_s"] / 1e6 for name in caches
    }
    coarse, fine = (f"{name}_cpu_s" for name in caches)
    found["pool_fine_over_coarse"] = figures[fine] / figures[coarse]
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    gc.disable()  # as ``sim run`` does
    meta, _ = load_trace(arguments.trace)
    config = EngineConfig(
        num_gpu_blocks=arguments.blocks + 1,
        block_size=meta.block_size or 16,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        async_scheduling=not arguments.sync,
    )
    model = make_model(COSTS, config, Noise(step_log_ratio=(SPREAD,), frontend_log_ratio=SPREAD))
    figures = bench_command(arguments.trace, model, arguments.runs)
    figures |= bench_hour(arguments.trace, model, arguments.runs, plain=arguments.plain)
    if config.block_size % FINE_PARTS == 0:
        figures |= bench_fine_hour(arguments.trace, model, arguments.runs)
        fine = figures[f"hour_block{config.block_size // FINE_PARTS}_run_least_cpu_s"]
        figures["hour_fine_over_coarse"] = round(fine / figures["hour_run_least_cpu_s"], 3)
    figures |= bench_caches(arguments.trace, arguments.blocks, arguments.runs)
    if arguments.million:
        # In a process of its own, so that the most memory that it ever had is the million's.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            figures |= alone.submit(bench_million, arguments.million, model).result()
    figures |= ratios(figures) | {"load_average": round(os.getloadavg()[0], 2)}
    if arguments.json:
        print(json.dumps(figures))
        return
    if arguments.markdown:
        print(f"{platform.machine()}, Python {platform.python_version()}\n\n| figure | value |\n|---|---|")
    line = "| {} | {:,} |" if arguments.markdown else "{:<36}{:>18,}"
    print("\n".join(line.format(name, value) for name, value in figures.items()))


if __name__ == "__main__":
    main()
