"""Cost of the tap beside nginx: one run, one machine, everything recorded.

    python -m scripts.bench_tap                      # under three minutes
    python -m scripts.bench_tap --quick              # under 40 seconds: one short round, nginx and one tap
    python -m scripts.bench_tap --only cpu,ttft --proxies nginx,tap-ids

The upstream and the load client share one process on core 0, every proxy runs on core 1, the tap's recorder on core 0
at its own low priority. Rounds are interleaved, every proxy once a round, and figures are medians over rounds. What is
measured how stands in docs/dev/tap-bench.md.
"""

import argparse
import contextlib
import gc
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.proxybench.conditions import Conditions, Watch
from scripts.proxybench.engine import Engine
from scripts.proxybench.measures import (
    LARGE_PROMPT_BYTES,
    UNEVEN_GAPS_MS,
    first_tokens,
    pin_to_load_core,
    stream_window,
)
from scripts.proxybench.proxies import Proxy, binary, nginx, tap, version
from scripts.proxybench.results import Results, as_json, table
from wire.loop import run

PROXIES = ("nginx", "tap-ids")
QUICK_PROXIES = ("nginx", "tap-ids")
MEASURES = ("cpu", "latency", "ttft")
BUSY_STREAMS, QUIETER_STREAMS = 512, 128


@dataclass(frozen=True, slots=True)
class Plan:
    """Amount of measuring."""

    rounds: int
    window_s: float
    requests: int
    """Of each size, a round, for the TTFT."""


FULL = Plan(rounds=3, window_s=2.0, requests=110)
QUICK = Plan(rounds=1, window_s=1.0, requests=60)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="one short round: a look, not a result")
    made.add_argument("--rounds", type=int, metavar="N", help=f"default {FULL.rounds}, quick {QUICK.rounds}")
    made.add_argument(
        "--proxies",
        metavar="LIST",
        help=f"beside none at all; default {','.join(PROXIES)}, quick {','.join(QUICK_PROXIES)}",
    )
    made.add_argument("--only", default=",".join(MEASURES), metavar="LIST", help="measurements; default %(default)s")
    made.add_argument("--tap-flags", default="", metavar="FLAGS", help="further flags of the tap, as one argument")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure with its rounds")
    return made


class Bench:
    """State of a run: proxies that are up, an engine behind them, results."""

    def __init__(self, plan: Plan, engine: Engine, proxies: Sequence[Proxy]) -> None:
        self._plan, self._engine, self._proxies = plan, engine, proxies
        self.results = Results()

    async def measure(self, measures: Sequence[str]) -> None:
        """Take all measurements of all proxies, round after round."""
        each = {"cpu": self._cpu, "latency": self._latency, "ttft": self._ttft}
        for number in range(self._plan.rounds):
            for measure in (each[name] for name in MEASURES if name in measures):
                for proxy in self._proxies:
                    _progress(f"round {number + 1} of {self._plan.rounds}: {measure.__name__[1:]} {proxy.name}")
                    await measure(proxy)
        self.results.finish()

    async def _cpu(self, proxy: Proxy) -> None:
        window = await stream_window(
            self._engine, proxy, streams=BUSY_STREAMS, gaps_ms=UNEVEN_GAPS_MS, warm_s=0.4, window_s=self._plan.window_s
        )
        self.results.add(proxy.name, "cpu", window.cpu_us_per_chunk)
        self.results.add(proxy.name, "recorder_cpu", window.recorder_us_per_chunk)
        self.results.add(proxy.name, "rate", window.chunks / window.seconds)
        self.results.add(proxy.name, "rss", window.rss_mb)
        self.results.failed[proxy.name] += window.failures

    async def _latency(self, proxy: Proxy) -> None:
        window = await stream_window(
            self._engine,
            proxy,
            streams=QUIETER_STREAMS,
            gaps_ms=UNEVEN_GAPS_MS,
            warm_s=0.3,
            window_s=self._plan.window_s,
        )
        self.results.add_latencies(proxy.name, window.latency_us)
        self.results.failed[proxy.name] += window.failures

    async def _ttft(self, proxy: Proxy) -> None:
        for figure, size, pause_s in (("ttft", 400, 0.002), ("ttft_large", LARGE_PROMPT_BYTES, 0.02)):
            times = await first_tokens(proxy, self._plan.requests, size, pause_s)
            self.results.add(proxy.name, figure, statistics.median(times))


@contextlib.asynccontextmanager
async def proxies_up(
    wanted: Sequence[str], folder: Path, upstream: int, args: argparse.Namespace
) -> AsyncIterator[list[Proxy]]:
    """Start all wanted and installed proxies at once; an idle proxy costs nothing."""
    async with contextlib.AsyncExitStack() as stack:
        found = [Proxy("direct", upstream)]
        if "nginx" in wanted and binary("nginx") is None:
            print("bench_tap: nginx is not installed (Debian: apt-get install nginx): left out", file=sys.stderr)
        elif "nginx" in wanted:
            found.append(await stack.enter_async_context(nginx(folder, upstream)))
        flags = ["--no-engine-facts", *args.tap_flags.split()]
        taps = [name for name in ("ids",) if f"tap-{name}" in wanted]
        found += [await stack.enter_async_context(tap(folder, upstream, name, flags)) for name in taps]
        yield found


async def bench(args: argparse.Namespace) -> None:
    """Measure, print the table, keep the JSON."""
    plan = QUICK if args.quick else FULL
    plan = replace(plan, rounds=args.rounds or plan.rounds)
    wanted = args.proxies.split(",") if args.proxies else QUICK_PROXIES if args.quick else PROXIES
    engine = Engine()
    upstream = await engine.listen()
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="bench-tap-") as name:
        async with proxies_up(wanted, Path(name), upstream, args) as proxies:
            work = Bench(plan, engine, proxies)
            gc.collect()
            gc.freeze()
            await work.measure(args.only.split(","))
            conditions = watch.stop(pid for proxy in proxies for pid in (proxy.pid, proxy.recorder) if pid is not None)
    _progress("")
    report(work.results, proxies, conditions, plan, args)


def report(
    results: Results, proxies: Sequence[Proxy], conditions: Conditions, plan: Plan, args: argparse.Namespace
) -> None:
    """The table, the conditions, the taps' own accounts; the same as JSON."""
    names = [proxy.name for proxy in proxies]
    accounts = {proxy.name: proxy.account for proxy in proxies if proxy.account}
    for name, account in accounts.items():
        results.add(name, "lost", account["offered"] - account["recorded"])
    print(table(results, names))
    print(f"\n{conditions}; rounds: {plan.rounds}")
    for name, account in accounts.items():
        counts = f"offered {account['offered']:,}, recorded {account['recorded']:,}, dropped {account['dropped'] or 0}"
        print(f"{name}: {counts}")
    if args.json is not None:
        versions = {"nginx": version("nginx")}
        facts = {"conditions": asdict(conditions), "plan": asdict(plan), "versions": versions, "accounts": accounts}
        args.json.write_text(json.dumps({**facts, "figures": as_json(results, names)}, indent=1) + "\n")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Pin, raise the limit of open files, measure."""
    args = parser().parse_args(argv)
    pin_to_load_core()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    run(bench(args))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
