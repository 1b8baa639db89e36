"""Workers as Ray actors: one load wherever they run, one trace, and clocks that are told apart."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.runs.rayworkers import CLOCK_SAMPLES, clock_ahead_ns
from tests.jsonoutput import json_of
from tracefile.files.reading import load_trace

SESSIONS = shlex.split(
    "--pattern multiturn --turns 2 --rate 60 --number 8 --prefix-count 2 --prefix-tokens 40 --prompt-tokens 20:50"
    " --output-tokens 3:9 --seed 4"
)


class SkewedClock:
    """Two machines' clocks: each look takes a while, and the other one is ahead."""

    def __init__(self, ahead_ns: int, delays_ns: list[int]) -> None:
        self.now_ns, self.ahead_ns = 0, ahead_ns
        self.delays_ns = iter(delays_ns)

    def ours(self) -> int:
        return self.now_ns

    async def theirs(self) -> int:
        delay_ns = next(self.delays_ns)
        self.now_ns += delay_ns // 2
        reported_ns = self.now_ns + self.ahead_ns
        self.now_ns += delay_ns - delay_ns // 2
        return reported_ns


def test_clock_offset_from_the_fastest_exchange() -> None:
    clock = SkewedClock(5_000_000, [900, 400, 1000, *[700] * CLOCK_SAMPLES])
    assert asyncio.run(clock_ahead_ns(clock.theirs, clock.ours)) == 5_000_000


def run_on(cluster: str, engine: Any, trace: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "loadgen", "--url", engine.url, "-o", str(trace), "--ray", cluster, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.ray
def test_ray_workers_give_the_same_run(cluster: str, engine: Any, tmp_path: Path) -> None:
    engine.answer = [2000, 2001, 2002]
    folder = tmp_path / "run"
    folder.mkdir()
    local = ["--url", engine.url, "-o", str(folder / "local"), *SESSIONS, "--nonce", "n"]
    here = json_of(main, local)
    done = run_on(cluster, engine, folder / "ray.zst", *SESSIONS, "--nonce", "n", "--procs", "auto", "--json")
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    for key in ("digest", "sent", "statuses"):
        assert here[key] == there[key], key
    for name in ("input_tokens", "output_tokens"):
        assert here["metrics"]["per_request"][name]["mean"] == there["metrics"]["per_request"][name]["mean"]
    assert len(there["processes"]) == 4
    _, records = load_trace(folder / "ray.zst")
    assert {each.request_id for each in records} == {each.request_id for each in load_trace(folder / "local")[1]}
    ends = [record.end_ms() or 0.0 for record in records]
    assert ends == sorted(ends)
    assert sorted(os.listdir(folder)) == ["local", "ray.zst"]

    too_many = run_on(cluster, engine, folder / "more", *SESSIONS, "--procs", "5")
    assert too_many.returncode == 2
    assert "--procs: 5 workers on 4 cores; expected a Ray cluster with a core for each" in too_many.stderr
