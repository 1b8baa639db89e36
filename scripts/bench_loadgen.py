"""Benchmark of loadgen against aiohttp and the bare loop: throughput on one core, TTFT errors, send lag.

    python -m scripts.bench_loadgen                       # about seven minutes
    python -m scripts.bench_loadgen --quick               # under two minutes: a check, not a result

The client and its processes run on core 1, the reference server on core 0. Rates and errors are computed from the
server's log, alike for all clients. Method: docs/dev/load-bench.md.
"""

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from scripts.conditions import Watch
from scripts.figures import Figure, figure_table
from scripts.loadbench.runs import Client, Measured, cases, loadgen, measure, reference, trace_ttfts

CLIENTS = (
    Client("kvtape", loadgen, trace_ttfts),
    reference("aiohttp", "aiohttp_client"),
    reference("bare loop", "protocol_client"),
)
ROWS: Sequence[tuple[str, str, Callable[[Measured], float | None], str, str]] = [
    ("short", "16-token streams, requests/s", lambda run: run.requests_per_s, ",.0f", "≥ aiohttp × 1.3"),
    ("short", "– CPU µs per request", lambda run: run.cpu_us_per_request, ",.0f", ""),
    ("short", "– cores used by the server", lambda run: run.server_cpu, ".2f", ""),
    ("short", "launch to first request, s", lambda run: run.first_request_s, ".2f", "≤ 1.5"),
    ("long", "256-token streams, events/s", lambda run: run.events_per_s, ",.0f", "≥ aiohttp × 1.5"),
    ("long", "– CPU µs per request", lambda run: run.cpu_us_per_request, ",.0f", ""),
    ("rate50", "50/s: TTFT error p50, ms", lambda run: run.ttft_error_p50_ms, ".2f", "≤ 0.2"),
    ("rate50", "– TTFT error p99, ms", lambda run: run.ttft_error_p99_ms, ".2f", "≤ bare loop × 1.5"),
    ("rate50", "– lag p99, ms", lambda run: run.lag_p99_ms, ".2f", "≤ 2"),
    ("rate200", "200/s: TTFT error p50, ms", lambda run: run.ttft_error_p50_ms, ".2f", "≤ 0.3"),
    ("rate200", "– TTFT error p99, ms", lambda run: run.ttft_error_p99_ms, ".2f", "≤ bare loop × 1.5"),
    ("rate200", "– lag p99, ms", lambda run: run.lag_p99_ms, ".2f", "≤ 2"),
]
"""Case, label, value, format, and goal for kvtape."""


def bench(folder: Path, *, quick: bool) -> list[Measured]:
    """Run each client on each case, round by round."""
    runs = []
    for turn in range(1 if quick else 3):
        for case in cases(3.0 if quick else 5.0):
            for client in CLIENTS:
                runs.append(measure(client, case, folder / f"{case.name}-{client.name}-{turn}"))
                if runs[-1].complaint is not None:
                    print(f"{client.name}, {case.name}: {runs[-1].complaint}", file=sys.stderr)
    return runs


def table(runs: Sequence[Measured]) -> str:
    """Return a table with a row per figure and a column per client: medians over rounds, and kvtape's ratios."""
    figures = [Figure(f"{case} {label}", label, form, goal) for case, label, _, form, goal in ROWS]
    rounds: dict[str, dict[str, list[float]]] = {run.client: {} for run in runs}
    for run in runs:
        for figure, (case, _, value_of, *_) in zip(figures, ROWS, strict=True):
            if case == run.case and (value := value_of(run)) is not None:
                rounds[run.client].setdefault(figure.name, []).append(value)
    return figure_table(figures, rounds, "kvtape", [client for client in rounds if client != "kvtape"])


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
    print(table(runs))
    print(f"\n{datetime.now(UTC):%Y-%m-%d}; {conditions}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
