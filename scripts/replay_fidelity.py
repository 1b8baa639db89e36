"""Fidelity of a replay to its capture, on a real engine: the table of docs/replay.md.

    python -m scripts.replay_fidelity --engine vllm --out out/fidelity    # about fifteen minutes

One session load is captured twice (two runs of one load: the yardstick), then the first capture is replayed: twice warm
with the real answers in later prompts, once warm without them, and twice cold with no reset in between.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.demo import capture, engine
from scripts.engine_home import measuring_cores, on_core
from scripts.job import Command, Workspace, add_engine_arguments

LOAD = (
    "--pattern multiturn --turns 4 --rate 0.4 --number 40 --seed 21 --think 0.2s:1.0s"
    " --prefix-count 3 --prefix-tokens 2500 --prompt-tokens 64:256 --output-tokens 16:96"
)
REPLAYS = {
    "replayed": ["--reset-cache"],
    "replayed-again": ["--reset-cache"],
    "made-up": ["--reset-cache", "--no-output-substitution"],
    "cold": ["--cold-prompts"],
    "cold-again": ["--cold-prompts"],
}
COHORTS = ("turn1", "turns2+")


def run_replays(work: Workspace, url: str, replays: Sequence[str]) -> dict[str, Path]:
    """Capture, capture again, replay in each way; returns the traces by label."""
    traces = {name: capture(work, url, name, LOAD) for name in ("captured", "again")}
    for name in replays:
        traces[name] = work.path(f"{name}.jsonl.zst")
        source: Command = ["replay", traces["captured"], "--url", url, "--replay-sessions"]
        work.run(name, [*source, *REPLAYS[name], "-o", traces[name], *work.way])
    return traces


def compare(work: Workspace, traces: dict[str, Path]) -> dict[str, Any]:
    """``report compare`` over all of them, as its JSON."""
    output = work.path("report.json")
    labelled = [f"{label}={path}" for label, path in traces.items()]
    yardsticks = ["--repeat", "again"]
    if {"cold", "cold-again"} <= traces.keys():
        yardsticks += ["--truth", "cold-again=cold"]
    command: Command = ["report", "compare", *labelled, *yardsticks, "--html", work.path("report.html"), "--json"]
    work.run("report", command, stdout=output)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def table(result: dict[str, Any]) -> Iterator[str]:
    """Markdown: cached tokens request by request, then each cohort's TTFT."""
    yield "| run | against | n | exact | hit ratio | hit ratio (truth) |"
    yield "|---|---|---|---|---|---|"
    for label, pair in result["pairs"].items():
        cached = pair["cohorts"]["all"]["cached"]
        shares = " | ".join(f"{cached[name]:.1%}" for name in ("exact_share", "other_hit_ratio", "truth_hit_ratio"))
        yield f"| {label} | {pair['truth']} | {cached['n']} | {shares} |"
    for cohort in COHORTS:
        yield f"\nTTFT of {cohort}, ms:\n\n| run | n | p50 | p90 | p99 |\n|---|---|---|---|---|"
        for label, trace in result["traces"].items():
            ttft = trace["cohorts"][cohort]["ttft"]
            values = " | ".join(f"{ttft[level]['value_ms']:.0f}" for level in ("p50", "p90", "p99"))
            yield f"| {label} | {ttft['n']} | {values} |"


def main() -> int:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sim", "vllm"], default="vllm")
    add_engine_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("out/fidelity"), help="a directory, made anew")
    parser.add_argument("--replays", default=",".join(REPLAYS), metavar="LIST", help="which (%(default)s)")
    args = parser.parse_args()
    work = Workspace.of(args)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    load_core, _ = measuring_cores() if args.url is None else (None, None)
    with on_core(load_core), engine(args.engine, work, args.url) as url:
        traces = run_replays(work, url, args.replays.split(","))
    print("\n".join(table(compare(work, traces))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
