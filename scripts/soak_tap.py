"""The tap under mixed traffic for a long time: memory must stay flat, and no record may be lost or unaccounted for.

    python -m scripts.soak_tap                 # two minutes: a look
    python -m scripts.soak_tap --minutes 30    # a soak
    python -m scripts.soak_tap --hostile       # beside the actors of bench_hostile.py, client and upstream

Traffic is that of fault_tap.py: streams, unary requests, errors, streams lost upstream and streams left by the client,
every answer checked. The memory of each of the tap's processes is sampled every second; after the first third, in which
caches fill, a robust line (Theil-Sen) through the samples says how fast it grows. Exit code 1: memory grew, a client
saw something wrong, or the account of records does not add up.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from scipy.stats import theilslopes

from engines.routing import by_rendezvous, engine_seed
from scripts.proxybench.engine import Engine
from scripts.proxybench.hostile import SESSION, act_in_turn, in_process, serve
from scripts.proxybench.processes import free_port, rss_mb
from scripts.proxybench.tapprocess import RunningTap, records_in_files, running_tap
from scripts.proxybench.traffic import Traffic
from wire.loop import run
from wire.url import Origin

SAMPLE_S = 1.0
ROLES = ("tap", "worker", "recorder", "admin")
FLAT_MB, FLAT_SHARE = 3.0, 0.05
"""Memory is flat if what the line gains after the first third is below the larger of the two."""
PROGRESS_S = 30.0
USERS = b"users"
HOSTILE_MB, HOSTILE_REST_S = 2.0, 3.0
HOSTILE_FLAGS = ("--route", "session", "--engine-metrics-interval", "1s")
OWN_TOKENS = (500, 4000)
"""Prompts long enough for the recorder's index of a million blocks to fill within the first third of a soak."""

Samples = dict[str, list[tuple[float, float]]]
"""By process, named by its role and number: seconds and MB."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process over the run."""

    process: str
    first_mb: float
    last_mb: float
    peak_mb: float
    growth_mb: float
    """What the line through the samples gains from the first third to the end."""
    growth_mb_per_hour: float
    flat: bool


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--minutes", type=float, default=2.0, metavar="M", help="default %(default)g")
    made.add_argument("--users", type=int, default=32, metavar="N", help="clients at once (default %(default)s)")
    made.add_argument("--think-s", type=float, default=0.1, metavar="S", help="between a user's requests, in the mean")
    made.add_argument("--tap-flags", default="--workers 2 --rotate-mb 16", metavar="FLAGS", help="default %(default)s")
    made.add_argument("--hostile", action="store_true", help="a second, hostile upstream and a hostile client")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the outcome with every sample")
    return made


async def soak(args: argparse.Namespace) -> int:
    """Let traffic pass for the time asked for, then judge."""
    engine = Engine()
    upstream = await engine.listen()
    engine.gaps_ms = [2, 9, 4, 17, 1, 6]
    admin, hostile = free_port(), hostile_port(upstream)
    flags = ["--tokenizer", "ids", "--admin", f"127.0.0.1:{admin}", *args.tap_flags.split()]
    flags += ["--upstream", str(local(hostile)), *HOSTILE_FLAGS] if args.hostile else ["--no-engine-facts"]
    beside = [in_process(serve, hostile, HOSTILE_MB)] if args.hostile else []
    with tempfile.TemporaryDirectory(prefix="soak-tap-") as name:
        async with running_tap(Path(name), upstream, flags) as tap:
            session = [(b"X-Session-ID", USERS)] if args.hostile else []
            traffic = Traffic(tap.port, users=args.users, own_tokens=OWN_TOKENS, think_s=args.think_s, headers=session)
            traffic.start()
            if args.hostile:
                beside.append(in_process(act_in_turn, tap.port, hostile, HOSTILE_MB, HOSTILE_REST_S))
            scraping = asyncio.create_task(scrape(admin))
            samples = await sample(tap, traffic, args.minutes * 60)
            scraping.cancel()
            for process in beside:
                process.kill()
            await traffic.stop()
            await tap.end()
            in_files = records_in_files(tap.trace)
    return judge(args, samples, traffic, tap, in_files)


def local(port: int) -> Origin:
    """Origin of a port of this machine."""
    return Origin("http", "127.0.0.1", port)


def hostile_port(engine: int) -> int:
    """A port for the hostile upstream so that it gets the hostile session, and the engine the users'."""
    while True:
        hostile = free_port()
        seeds = [engine_seed(str(local(port))) for port in (engine, hostile)]
        if by_rendezvous(seeds, USERS)[0] == 0 and by_rendezvous(seeds, SESSION)[0] == 1:
            return hostile


async def sample(tap: RunningTap, traffic: Traffic, seconds: float) -> Samples:
    """Sample the memory of all processes once a second; print a progress line now and then."""
    samples: Samples = defaultdict(list)
    started = said = time.monotonic()
    while (now := time.monotonic()) - started < seconds:
        for role in ROLES:
            for number, pid in enumerate(tap.pids(role)):
                with contextlib.suppress(OSError):
                    samples[f"{role} {number + 1}"].append((now - started, rss_mb(pid)))
        if now - said >= PROGRESS_S:
            said = now
            memory = ", ".join(f"{process} {taken[-1][1]:.1f}" for process, taken in samples.items())
            failed = traffic.tally.failures.total()
            print(
                f"{now - started:6.0f} s: {traffic.tally.total:,} requests, {failed} failures; MB: {memory}", flush=True
            )
        await asyncio.sleep(SAMPLE_S)
    return samples


async def scrape(port: int) -> None:
    """Ask for the metrics every five seconds, as a Prometheus would."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        while True:
            await asyncio.sleep(5.0)
            with contextlib.suppress(httpx.HTTPError):
                await client.get("/metrics")


def memory_of(process: str, taken: Sequence[tuple[float, float]]) -> Memory:
    """The line through the last two thirds of a process's samples."""
    times, values = np.array(taken).T
    settled = times >= times[0] + (times[-1] - times[0]) / 3
    slope = float(theilslopes(values[settled], times[settled]).slope) if settled.sum() > 2 else 0.0
    growth = slope * float(times[-1] - times[settled][0])
    return Memory(
        process=process,
        first_mb=float(values[0]),
        last_mb=float(values[-1]),
        peak_mb=float(values.max()),
        growth_mb=growth,
        growth_mb_per_hour=slope * 3600,
        flat=growth < max(FLAT_MB, FLAT_SHARE * float(np.median(values[settled]))),
    )


def judge(args: argparse.Namespace, samples: Samples, traffic: Traffic, tap: RunningTap, in_files: int) -> int:
    """Print the outcome; the exit code."""
    tally = traffic.tally
    memories = [memory_of(process, taken) for process, taken in sorted(samples.items())]
    print(memory_table(memories))
    print(f"\n{tally.total:,} requests, {tally.total / args.minutes / 60:.0f} a second: {dict(tally.sent)}")
    print(f"seen by clients: {tally.failures.total()} failures {dict(tally.failures) or ''}")
    said, exact = account(tally.total, tap.account, in_files, others=args.hostile)
    print(said)
    if args.json is not None:
        outcome = {"sent": tally.sent, "failures": tally.failures, "account": tap.account, "in_files": in_files}
        outcome |= {"memory": [asdict(one) for one in memories], "samples": samples, "exact": exact}
        args.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 0 if exact and not tally.failures and all(one.flat for one in memories) else 1


def memory_table(memories: Sequence[Memory]) -> str:
    """A row a process."""
    row = "{:<12} {:>9} {:>9} {:>9} {:>24} {:>12}  {}"
    rows = [row.format("process", "first MB", "last MB", "peak MB", "growth after 1/3, MB", "MB an hour", "flat")]
    for one in memories:
        values = (one.first_mb, one.last_mb, one.peak_mb, one.growth_mb, one.growth_mb_per_hour)
        rows.append(row.format(one.process, *(f"{value:.1f}" for value in values), "yes" if one.flat else "NO"))
    return "\n".join(rows)


def account(sent: int, said: dict[str, Any], in_files: int, *, others: bool) -> tuple[str, bool]:
    """Account of all requests from three sides, and whether the sides agree; ``others`` sent uncounted ones."""
    offered, recorded, sampled_out = (said.get(name, 0) for name in ("offered", "recorded", "sampled_out"))
    dropped: dict[str, int] = said.get("dropped", {})
    exact = offered == recorded + sampled_out + sum(dropped.values()) and recorded == in_files
    exact = exact and (sent <= offered if others else sent == offered)
    counts = f"sent {sent:,}, offered {offered:,}, recorded {recorded:,}, in files {in_files:,}"
    return f"{counts}, sampled out {sampled_out:,}, dropped {dropped or 0}: {'exact' if exact else 'NOT EXACT'}", exact


def main(argv: Sequence[str]) -> int:
    """Soak and judge."""
    return run(soak(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
