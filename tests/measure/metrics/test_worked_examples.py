"""Numbers that trie, evalscope and Veeksha print as examples: reproduced where they agree, and named where not."""

import numpy as np
import pytest

from measure.metrics.requests import REQUEST_METRICS
from measure.quantiles import quantile_place
from tests.measure.metrics.made import request, run_of

VEEKSHA = {
    "scheduler_dispatched_at": 0.53709,
    "client_picked_up_at": 0.53723,
    "client_completed_at": 0.60328,
    "num_output_tokens": 7,
    "tpot": 0.00688,
    "ttfc": 0.0243,
    "end_to_end_latency": 0.06559,
    "normalized_end_to_end_latency": 0.00937,
    "output_throughput": 106.72167,
}
TBC_S = [0.00814, 0.0067, 0.00687, 0.00611, 0.00658, 0.00689]
"""Line of ``request_level_metrics.jsonl`` in Veeksha's documentation, in seconds."""


def test_veekshas_request() -> None:
    run = run_of(
        [
            request(
                "75",
                VEEKSHA["scheduler_dispatched_at"] * 1e3,
                ttft_ms=VEEKSHA["ttfc"] * 1e3,
                itl_ms=[gap * 1e3 for gap in TBC_S],
                e2e_ms=VEEKSHA["end_to_end_latency"] * 1e3,
                prompt_tokens=6,
                output_tokens=7,
            )
        ]
    )
    found = {name: float(REQUEST_METRICS[name](run)[0]) for name in REQUEST_METRICS}
    assert found["tpot_ms"] / 1e3 == pytest.approx(VEEKSHA["tpot"], abs=5e-6)  # its first read carried one token
    assert found["e2e_per_token_ms"] / 1e3 == pytest.approx(VEEKSHA["normalized_end_to_end_latency"], abs=5e-6)
    assert 7 / (found["e2e_ms"] / 1e3) == pytest.approx(VEEKSHA["output_throughput"], rel=1e-4)


def test_veekshas_prose_contradicts_its_request() -> None:
    # "TPOT = (client_completed_at - client_picked_up_at) / num_output_tokens": 9.4 ms, where the line has 6.88.
    prose = (VEEKSHA["client_completed_at"] - VEEKSHA["client_picked_up_at"]) / VEEKSHA["num_output_tokens"]
    assert prose == pytest.approx(0.00944, abs=5e-6)
    assert sum(TBC_S) / (VEEKSHA["num_output_tokens"] - 1) == pytest.approx(VEEKSHA["tpot"], abs=5e-6)
    # "E2E = client_completed_at - scheduler_dispatched_at": 66.19 ms; the line has TTFC + Σ TBC.
    assert VEEKSHA["client_completed_at"] - VEEKSHA["scheduler_dispatched_at"] == pytest.approx(0.06619, abs=5e-6)
    assert VEEKSHA["ttfc"] + sum(TBC_S) == pytest.approx(VEEKSHA["end_to_end_latency"], abs=5e-6)


TRIE_WORKLOAD = {
    "total": (24952.61, 30315.66, 30263.17, 3782.90),
    "cached": (19720.40, 25550.18, 24628.21, 3078.53),
    "uncached": (5232.21, 4765.47, 5634.96, 704.37),
    "completion": (278.97, 280.88, 281.12, 35.14),
}
"""Table of trie's documentation, of 8 GPUs: overall, last 30 s, steady state, steady state a GPU."""


def test_tries_workload_table() -> None:
    for total, cached, uncached in zip(*(TRIE_WORKLOAD[name] for name in ("total", "cached", "uncached")), strict=True):
        assert total == pytest.approx(cached + uncached, abs=0.011)
    for _, _, steady, a_gpu in TRIE_WORKLOAD.values():
        assert a_gpu == pytest.approx(steady / 8, abs=0.006)


def test_trie_counts_traces_as_requests() -> None:
    # "completed_requests=8 … wall_time_s=109.25" above "completed=8/8 trace/s=0.07": 8 traces, of many requests each.
    assert pytest.approx(0.07, abs=0.005) == 8 / 109.25


def test_trie_interpolates_quantiles_where_ours_are_values_that_occurred() -> None:
    p90, p95, p99, most = 99.497, 103.044, 105.882, 106.592  # latency of 8 traces, in s
    gap = (most - p99) / 0.07  # at 0.99 · 7 = 6.93: seven hundredths below the largest of eight
    before = most - gap
    assert before + 0.3 * gap == pytest.approx(p90, abs=0.01)
    assert before + 0.65 * gap == pytest.approx(p95, abs=0.01)
    assert {quantile_place(level, 8) for level in (0.90, 0.95, 0.99)} == {7}  # all three are the largest


EVALSCOPE = {"random": (4.32, 1103.48, 92.0, 1.60), "sharegpt": (3.87, 985.21, 186.3, 1.98)}
"""RPS, Gen/s, average output tokens and turns a request in evalscope's two example outputs."""


def test_evalscopes_examples_contradict_themselves() -> None:
    for rps, generated_per_s, output_tokens, _ in EVALSCOPE.values():
        assert generated_per_s / rps == pytest.approx(255, abs=1)  # its --max-tokens 256, not the average it prints
        assert generated_per_s / rps > 1.3 * output_tokens
    # Sessions of three turns hold 0, 1 and 2 turns of history: 1.0 on average. Its 1.98 counts the current turn too.
    assert np.mean([0, 1, 2]) == 1.0
    assert np.mean([1, 2, 3]) == pytest.approx(EVALSCOPE["sharegpt"][3], abs=0.05)
    # Of 2 to 5 turns, each as likely, the mean turn of a request is 34 / 14 with, 20 / 14 without the current one.
    turns = [turn for n in range(2, 6) for turn in range(1, n + 1)]
    assert EVALSCOPE["random"][3] not in (round(np.mean(turns), 2), round(np.mean(turns) - 1, 2))
