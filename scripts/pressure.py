"""Cached tokens under pressure: a pool too small for the load, and what the rules make of the schedule captured there.

    python -m scripts.pressure --engine sim    # on the embedded engine, about two minutes a pool
    python -m scripts.pressure --engine vllm   # on a real vLLM on this machine's CPU, three or four

Each pool size is an engine of its own. Every load goes through a tap into an emptied cache; ``sim audit`` then holds
the cached tokens that the engine reported against the rules, request by request. Preemptions are the engine's own
count. The loads evict all the time, and the smaller pools preempt.
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts import vllm_engine
from scripts.demo import EngineKind, capture
from scripts.engine_home import measuring_cores, on_core
from scripts.fidelity.engines import engine, preemptions, wait_until_idle
from scripts.fidelity.loads import EngineSettings
from scripts.job import Workspace

LOADS = {
    "multiturn": "--pattern multiturn --turns 4 --rate 1.2 --seed 31 --think 0.2s:2s --prefix-count 3"
    " --prefix-tokens 1000 --prompt-tokens 64:400 --output-tokens 32:128",
    "poisson": "--pattern poisson --rate 3.5 --seed 32 --prefix-count 12 --prefix-tokens 1500"
    " --prompt-tokens 32:300 --output-tokens 32:192",
    "burst": "--pattern burst --burst-size 24 --burst-every 10s --seed 33 --prefix-count 8 --prefix-tokens 700"
    " --prompt-tokens 32:500 --output-tokens 48:256",
}
STEP = ["--max-num-seqs", "32", "--max-num-batched-tokens", "2048"]
LONGEST = ["--max-model-len", "4096"]  # a longer one would not fit the smallest pool
SHAPE = vllm_engine.ModelShape()
HEADINGS = ["blocks", "load", "n", "exact", "reported", "by the rules", "evicted", "preempted", "by the rules"]


def measure(
    kind: EngineKind, work: Workspace, sizes: Sequence[int], loads: Sequence[str], seconds: float
) -> Iterator[dict[str, Any]]:
    """Capture and audit every load on every pool, one after another."""
    for blocks in sizes:
        settings = EngineSettings(SHAPE.hidden, SHAPE.layers, blocks)
        with engine(kind, work, settings, *STEP, *LONGEST) as url:
            for name in loads:
                wait_until_idle(url)
                before = preemptions(url)
                trace = capture(work, url, f"{name}-{blocks}", f"{LOADS[name]} --duration {seconds:g}s")
                preempted = preemptions(url) - before
                text = work.run(f"audit {name} {blocks}", ["sim", "audit", trace, *STEP, "--json"])
                yield {"blocks": blocks, "load": name, "engine_preemptions": preempted, **last_object(text)}


def last_object(text: str) -> dict[str, Any]:
    """The JSON object that a command printed last; notices may stand before it."""
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown table with a row per load, and below it the differences and their causes."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for one in results:
        cells = [
            f"{one['blocks']:,}",
            one["load"],
            f"{one['requests']:,}",
            f"{one['exact_share']:.1%}",
            f"{one['reported_tokens'] / one['prompt_tokens']:.2%}",
            f"{one['predicted_tokens'] / one['prompt_tokens']:.2%}",
            f"{one['evicted_blocks']:,}",
            f"{one['engine_preemptions']:,}",
            f"{one['preemptions']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    requests, exact = (sum(one[name] for one in results) for name in ("requests", "exact"))
    lines.append(f"\n{exact:,} of {requests:,} requests exact ({exact / requests:.2%}).")
    for one in results:
        causes = Counter(difference["cause"] for difference in one["differences"])
        lines += [f"- {one['load']}, {one['blocks']:,} blocks: {count} × {cause}" for cause, count in causes.items()]
    return "\n".join(lines)


def main() -> int:
    """Measure and print the table; 1 if fewer than ``--min-exact-share`` of all requests are exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sim", "vllm"], default="sim")
    parser.add_argument(
        "--num-gpu-blocks", type=int, nargs="+", default=[300, 500, 900], help="pool sizes, one engine each"
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=30.0, help="how long sessions arrive in each load")
    parser.add_argument("--min-exact-share", type=float, default=0.98, help="share of all requests that must be exact")
    parser.add_argument("--out", type=Path, default=Path("out/pressure"), help="a directory, made anew")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    load_core, _ = measuring_cores() if args.engine == "vllm" else (None, None)
    results = []
    with on_core(load_core):
        work = Workspace(args.out.resolve())
        for result in measure(args.engine, work, args.num_gpu_blocks, args.loads, args.seconds):
            results.append(result)
            (args.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"\n{table(results)}")
    exact = sum(one["exact"] for one in results) / sum(one["requests"] for one in results)
    return int(exact < args.min_exact_share)


if __name__ == "__main__":
    sys.exit(main())
