"""The benchmark of the embedded engine runs and misses no token; what it measures is not judged here."""

import sys

import pytest

from tests.warmstart import run_warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its client reads with epoll")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fidelity", "--rate", "40", "--seconds", "0.5", "--tokens", "6"), "TTFT, client's minus engine's: n 20;"),
        (("throughput", "--streams", "4", "--seconds", "0.3"), "streams of 16 tokens"),
        (("streams", "--streams", "20", "--seconds", "0.5", "--", "--t0-ms", "20"), "20 streams at once"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_benchmark_runs(arguments: tuple[str, ...], says: str) -> None:
    done = run_warm("scripts.bench_serve", *arguments)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
