"""Metrics of sessions by hand."""

import numpy as np

from measure.metrics.sessions import measure_sessions
from tests.measure.metrics.made import request, run_of

# trie's example workload: prompts 32, 56 = 32 + 16 + 8 and 88 = 56 + 20 + 12; outputs 16, 20 and 64; blocks of 16.
# The last token of an output has no KV: the first output fills no block, (32 + 16 − 1) // 16 = 2 blocks in all.
AGENT = [
    request(
        "1",
        0.0,
        session_id="s",
        turn=1,
        ttft_ms=100.0,
        itl_ms=[10.0] * 15,
        e2e_ms=260.0,
        prompt_tokens=32,
        output_tokens=16,
        cached_tokens=0,
        block_hashes=[1, 2],
        output_block_hashes=[],
    ),
    request(
        "2",
        1000.0,
        session_id="s",
        turn=2,
        ttft_ms=50.0,
        itl_ms=[20.0] * 19,
        e2e_ms=430.0,
        prompt_tokens=56,
        output_tokens=20,
        cached_tokens=32,
        block_hashes=[1, 2, 3],
        output_block_hashes=[4],
    ),
    request(
        "3",
        2000.0,
        session_id="s",
        turn=3,
        ttft_ms=60.0,
        e2e_ms=700.0,
        prompt_tokens=88,
        output_tokens=64,
        cached_tokens=64,
        block_hashes=[1, 2, 3, 4, 5],
        output_block_hashes=[6, 7, 8, 9],
    ),
]


def test_a_session_by_hand() -> None:
    result = measure_sessions(run_of(AGENT, block_size=16))
    assert result.completed.tolist() == [True]
    assert result.requests.tolist() == [3.0]  # num_turns + 1
    assert result.latency_ms.tolist() == [2700.0]  # 2000 + 700 − 0
    assert result.ttft_ms.tolist() == [100.0]
    assert result.ttfat_ms.tolist() == [2060.0]  # 2000 + 60 − 0
    assert result.decode_tps.tolist() == [75.0]  # mean of 1000 / 10 and 1000 / 20; the third's reads are not known
    assert result.hit_rate.tolist() == [96 / 176]  # (0 + 32 + 64) / (32 + 56 + 88)


def test_a_request_without_a_session_is_a_session() -> None:
    records = [request("a", 0.0, ttft_ms=5.0, e2e_ms=9.0), request("b", 1.0, e2e_ms=3.0, status="error")]
    result = measure_sessions(run_of(records))
    assert result.completed.tolist() == [True, False]
    assert result.latency_ms.tolist() == [9.0, 3.0]
    assert result.ttft_ms[0] == result.ttfat_ms[0] == 5.0
    assert np.isnan(result.hit_rate).all()
