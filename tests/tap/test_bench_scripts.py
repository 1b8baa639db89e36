"""The benchmark runs, and finds nothing lost; what they measure is not judged here."""

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
