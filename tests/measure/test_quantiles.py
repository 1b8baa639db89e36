"""One quantile rule: literal places, and numpy's inverted distribution as the oracle."""

import subprocess
import sys

import numpy as np
import pytest

from measure.quantiles import interval_indices, quantile, quantile_bucket, quantile_index


def test_quantile_is_the_order_statistic_ceil_qn() -> None:
    assert [quantile_index(level, 10) for level in (0.0, 0.1, 0.11, 0.5, 0.9, 0.99, 1.0)] == [0, 0, 1, 4, 8, 9, 9]
    assert [quantile_index(0.5, n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert quantile_index(0.07, 100) == 6  # 0.07 * 100 is a little above 7 in floats


@pytest.mark.parametrize("n", [1, 2, 7, 50, 1_000])
def test_quantile_inverts_the_distribution(n: int) -> None:
    values = np.sort(np.random.default_rng(n).random(n))
    for level in (0.01, 0.3, 0.5, 0.9, 0.95, 0.99):
        expected = np.quantile(values, level, method="inverted_cdf")
        assert quantile(values, level) == quantile(values.tolist(), level) == expected


def test_an_interval_of_draws_covers_a_further_draw_with_its_confidence() -> None:
    assert [interval_indices(0.90, n) for n in (1, 3, 19, 20, 64, 500)] == [
        (0, 0), (0, 2), (0, 18), (0, 19), (2, 61), (24, 475)
    ]  # fmt: skip
    # (n + 1) · tail is a whole number here, which floats miss to either side.
    assert [interval_indices(confidence, 199) for confidence in (0.95, 0.9, 0.8)] == [(4, 194), (9, 189), (19, 179)]
    for n in (64, 128, 256):
        low, high = interval_indices(0.90, n)
        assert 0.90 <= (high - low) / (n + 1) < 0.91


def test_bucket_quantiles_equal_exact_quantiles() -> None:
    counts = [3, 0, 5, 2]
    values = sorted(bucket for bucket, count in enumerate(counts) for _ in range(count))
    for level in (0.0, 0.3, 0.31, 0.8, 0.81, 1.0):
        assert quantile_bucket(np.cumsum(counts).tolist(), level) == quantile(values, level)


PURE = ("measure.quantiles", "measure.live_counts", "measure.histogram")


@pytest.mark.parametrize("module", ["tap.proxy.worker", "loadgen.sending.sender", *PURE])
def test_data_plane_imports_no_numpy(module: str) -> None:
    # 30 MB and 0.2 s of every process that relays or sends.
    code = f"import {module}, sys; print([name for name in ('numpy', 'scipy', 'numba') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
