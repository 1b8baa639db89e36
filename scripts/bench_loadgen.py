"""Rates that loadgen reaches on one core, and the error of its times, beside aiohttp and the bare loop.

    python -m scripts.bench_loadgen                       # about seven minutes
    python -m scripts.bench_loadgen --quick               # under two minutes: a look, not a result

The client and all that it starts run on core 1, the reference server on core 0. Rates and errors are those that
the server saw, the same way for all. What is measured how stands in docs/dev/load-bench.md. The last row is loadgen's
expansion of block hashes to bytes of JSON.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from loadgen.core.bodies import encode_ids
from loadgen.core.draws import expand_tokens
from loadgen.core.vocabulary import ORDINARY
from scripts.loadbench.runs import Client, Measured, cases, loadgen, measure, reference, trace_ttfts
from scripts.markdown import markdown_table
from scripts.proxybench.conditions import Watch

CLIENTS = (
    Client("kvtape", loadgen, trace_ttfts),
    reference("aiohttp", "aiohttp_client"),
    reference("bare loop", "protocol_client"),
)
Figure = Callable[[Measured], float | None]
ROWS: Sequence[tuple[str, str, Figure, str, str, float]] = [
    ("short", "16-token streams, requests/s", lambda run: run.requests_per_s, ",.0f", "≥ aiohttp ×", 1.3),
    ("short", "– CPU µs per request", lambda run: run.cpu_us_per_request, ",.0f", "", 0),
    ("short", "– cores used by the server", lambda run: run.server_cpu, ".2f", "", 0),
    ("short", "launch to first request, s", lambda run: run.first_request_s, ".2f", "≤", 1.5),
    ("long", "256-token streams, events/s", lambda run: run.events_per_s, ",.0f", "≥ aiohttp ×", 1.5),
    ("long", "– CPU µs per request", lambda run: run.cpu_us_per_request, ",.0f", "", 0),
    ("rate50", "50/s: TTFT error p50, ms", lambda run: run.ttft_error_p50_ms, ".2f", "≤", 0.2),
    ("rate50", "– TTFT error p99, ms", lambda run: run.ttft_error_p99_ms, ".2f", "≤ bare loop ×", 1.5),
    ("rate50", "– lag p99, ms", lambda run: run.lag_p99_ms, ".2f", "≤", 2),
    ("rate200", "200/s: TTFT error p50, ms", lambda run: run.ttft_error_p50_ms, ".2f", "≤", 0.3),
    ("rate200", "– TTFT error p99, ms", lambda run: run.ttft_error_p99_ms, ".2f", "≤ bare loop ×", 1.5),
    ("rate200", "– lag p99, ms", lambda run: run.lag_p99_ms, ".2f", "≤", 2),
]
"""Case, name, figure, its form, and the goal for kvtape: sign and bound; a bound of 0: none."""


def bench(folder: Path, *, quick: bool) -> list[Measured]:
    """Run each client on each case, round after round."""
    runs = []
    for turn in range(1 if quick else 3):
        for case in cases(3.0 if quick else 5.0):
            for client in CLIENTS:
                runs.append(measure(client, case, folder / f"{case.name}-{client.name}-{turn}"))
                if runs[-1].complaint is not None:
                    print(f"{client.name}, {case.name}: {runs[-1].complaint}", file=sys.stderr)
    return runs


def table(runs: Sequence[Measured]) -> str:
    """A row a figure, a column a client: the median over rounds; ratios are kvtape's over each of the others."""
    clients = list(dict.fromkeys(run.client for run in runs))
    rows = []
    for case, name, figure, form, sign, bound in ROWS:
        of_case = [(run.client, figure(run)) for run in runs if run.case == case]
        figures = {client: median([value for other, value in of_case if other == client]) for client in clients}
        if not any(value is not None for value in figures.values()):
            continue
        ours = figures.get("kvtape")
        cells = ["" if value is None else format(value, form) for value in figures.values()]
        others = [value for client, value in figures.items() if client != "kvtape"]
        ratios = [f"{ours / value:.2f}" if ours and value else "" for value in others]
        limit = bound * (figures.get(sign[2:-2], 1.0 if len(sign) == 1 else None) or 0.0)
        reached = "" if not limit or ours is None else "yes" if (ours <= limit) == (sign[0] == "≤") else "NO"
        rows.append([name, *cells, *ratios, f"{sign} {bound:g}" if bound else "", reached])
    beside = [f"kvtape / {client}" for client in clients if client != "kvtape"]
    return markdown_table(["", *clients, *beside, "goal", "reached"], rows, numbers=True)


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def expansion_rate(tokens: int = 10_240, block_size: int = 16) -> float:
    """Return tokens a second from block hashes to bytes of JSON, in one process."""
    keys, prompts = np.arange(tokens // block_size, dtype=np.uint64), 0
    began_s = time.perf_counter()
    while time.perf_counter() < began_s + 0.5:
        encode_ids(expand_tokens(keys, block_size, ORDINARY).ravel())
        prompts += 1
    return prompts * tokens / (time.perf_counter() - began_s)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter runs, one round")
    args = parser.parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="bench-loadgen-") as name:
        os.environ["KVTAPE_KEY_FILE"] = f"{name}/key"
        runs = bench(Path(name), quick=args.quick)
    conditions = watch.stop(())
    print(f"{table(runs)}\n\nexpansion: {expansion_rate() / 1e6:.0f} million tokens/s (goal 5)")
    print(f"{datetime.now(UTC):%Y-%m-%d}; {conditions}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
