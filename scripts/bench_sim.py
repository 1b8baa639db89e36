"""Benchmark of the simulator: an hour of traffic, the block pool, the hit curve, a million synthetic requests; and
Dynamo's replay of the same trace, on one engine and on four engines with its routers.

    python -m scripts.bench_sim mooncake/conversation_trace.jsonl --million 1000000 --dynamo VENV/bin/python

The engine's step times are hypothetical, fast enough for an hour of that trace. Values in seconds are medians over
``--runs``; for commands, minimum.
"""

import argparse
import gc
import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from measure.cache.hitcurve import hit_curve
from scripts.markdown import markdown_table
from scripts.simbench.hour import bench_command, bench_hour
from scripts.simbench.million import bench_million
from scripts.simbench.peer import bench_peer
from scripts.simbench.timing import Figures, measure
from sim.cache.curve import read_accesses
from sim.latency.modelfile import make_model
from sim.latency.noise import LEVELS, Noise
from sim.vllm.config import EngineConfig
from sim.vllm.kvcache import single_group_cache
from sim.workload.chain import Chains
from sim.workload.prompts import Prompts, lay_out
from tracefile.files.reading import load_trace
from tracefile.records.batches import Batch

COSTS = {
    "t0_ms": 6.0,
    "per_prefill_token_ms": 0.02,
    "per_attention_token2_ms": 1e-7,
    "per_decode_ms": 0.02,
    "per_kv_token_ms": 2e-6,
    "frontend_base_ms": 2.0,
    "frontend_ms_per_prompt_token": 0.0005,
}
SPREAD = tuple(0.02 * (level - len(LEVELS) // 2) for level in range(len(LEVELS)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of the simulator.")
    parser.add_argument("trace", type=Path, help="a trace with block hashes")
    parser.add_argument("--blocks", type=int, default=10_000, help="usable blocks (default 10000)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--sync", action="store_true", help="synchronous scheduling")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of each measurement (default 5)")
    parser.add_argument("--million", type=int, default=0, metavar="N", help="generate and run N requests")
    parser.add_argument("--dynamo", type=Path, metavar="PYTHON", help="a Python with ai-dynamo")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def bench_caches(trace: Path, usable: int, runs: int) -> Figures:
    """Measure the block pool with ``usable`` blocks, one request at a time, and the complete hit curve, from memory."""
    meta, records = load_trace(trace)
    batch = Batch(records)
    prompts, accesses = lay_out(batch, batch.hashes(), Chains(meta)), read_accesses(trace)
    pool = partial(pool_hits, prompts, usable)
    figures = measure("pool", runs, pool)
    figures |= {"pool_hit_blocks": pool(), "pool_blocks": int(prompts.num_blocks.sum())}
    return figures | measure("curve", runs, partial(hit_curve, accesses))


def pool_hits(prompts: Prompts, usable: int) -> int:
    """Count the hit blocks of a trace."""
    cache = single_group_cache(prompts.block_size, usable)
    return sum(cache.serve_alone(request) for request in prompts.requests()) // prompts.block_size


def main() -> None:
    arguments = parse_arguments()
    gc.disable()  # like ``sim run``
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
    figures |= bench_hour(arguments.trace, model, arguments.runs)
    figures |= bench_caches(arguments.trace, arguments.blocks, arguments.runs)
    if arguments.dynamo:
        figures |= bench_peer(arguments.dynamo, arguments.trace, config, arguments.runs)
    if arguments.million:
        # In a separate process, so that its peak memory is that of the million requests.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            figures |= pool.submit(bench_million, arguments.million, model).result()
    figures["load_average"] = round(os.getloadavg()[0], 2)
    if arguments.json:
        print(json.dumps(figures))
        return
    print(markdown_table(["figure", "value"], [[name, f"{value:,}"] for name, value in figures.items()], numbers=True))


if __name__ == "__main__":
    main()
