"""The benchmark and the soak run, and find nothing lost; what they measure is not judged here."""

import json
from pathlib import Path
from typing import Any

from tests.warmstart import run_warm


def run_script(name: str, outcome: Path, *flags: str) -> Any:
    """What a script writes with ``--json``."""
    done = run_warm(f"scripts.{name}", *flags, "--json", outcome)
    assert outcome.exists(), done.stderr
    return json.loads(outcome.read_text())


def test_the_benchmark_measures_a_tap_that_records_everything(tmp_path: Path) -> None:
    flags = ("--quick", "--only", "latency,ttft", "--proxies", "tap-ids")
    found = run_script("bench_tap", tmp_path / "bench.json", *flags)
    figures = found["figures"]["tap ids"]
    assert figures["lost"]["value"] == 0
    assert figures["failures"]["value"] == 0
    # 128 streams, then 60 requests and 5 to warm up, of either size.
    assert found["accounts"]["tap ids"]["offered"] == 128 + 2 * 65
    assert {"p50", "p99", "ttft", "ttft_large", "itl_distance", "crowded"} <= set(figures)


def test_a_short_soak_loses_nothing_and_knows_every_process(tmp_path: Path) -> None:
    found = run_script("soak_tap", tmp_path / "soak.json", "--minutes", "0.05", "--users", "4")
    assert found["exact"], found["account"]
    assert found["failures"] == {}
    assert {one["process"] for one in found["memory"]} == {"tap 1", "worker 1", "worker 2", "recorder 1", "admin 1"}


def test_the_harm_of_a_hostile_client_is_measured_in_every_process(tmp_path: Path) -> None:
    harms = run_script("bench_hostile", tmp_path / "hostile.json", "--quick", "--only", "half-open")
    tap = harms[-1]
    assert (tap["actor"], tap["proxy"]) == ("client: half-open connections", "tap")
    assert set(tap["peak_mb"]) == {"tap", "worker", "recorder", "admin"}
    assert min(tap["peak_mb"].values()) > 10
    assert tap["p50_ms"] <= tap["p99_ms"] <= tap["max_ms"]
