"""Hits by size of cache as a metric: a hand-computed trace, and the same numbers as the accounts of hits."""

from pathlib import Path

import pytest

from measure.metrics.prefixcache import KNEE_SHARE
from measure.metrics.results import CacheSize
from measure.metrics.trace import analyse_chains, measure_run, read_run
from tests.measure.metrics.made import request, run_of
from tracefile.records.schema import BlockHash, Engine, Record, SessionId

CAPTURE = Path(__file__).parents[3] / "data" / "captures" / "128x2" / "session-short.jsonl.zst"


def asked(name: str, at_ms: float, blocks: list[int], session: str, **more: int) -> Record:
    """A prompt of so many blocks of 16 tokens, and a token more."""
    hashes = [BlockHash(block) for block in blocks]
    tokens = 16 * len(blocks) + 1
    return request(
        name, at_ms, e2e_ms=1.0, prompt_tokens=tokens, block_hashes=hashes, session_id=SessionId(session), **more
    )


def test_knee_and_engine_size() -> None:
    # a and b alternate: a's blocks 1 2 come again after b's 3, so that they need a cache of three blocks.
    records = [asked("1", 0.0, [1, 2], "a"), asked("2", 10.0, [3], "b"), asked("3", 20.0, [1, 2], "a")]
    result = measure_run(run_of(records, block_size=16, engine=Engine(num_gpu_blocks=3))).cache
    tokens = 33 + 17 + 33
    assert result == CacheSize(
        block_size=16,
        unlimited_rate=32 / tokens,
        knee_share=0.95,
        knee_blocks=3,
        knee_tokens=48,
        engine_blocks=2,  # one of three is vLLM's null block
        engine_tokens=32,
        engine_rate=16 / tokens,  # of LRU's last two touched, 3 and 1, the root is there
        engine_share=0.5,
        kv_bytes_per_token=None,
    )


def test_a_chain_is_complete_without_the_block_of_the_last_token() -> None:
    # Of 16 tokens the last one's KV is never computed: no block gets full, and none is missing. Of 17 one does.
    short = request("1", 0.0, prompt_tokens=15, output_tokens=1, block_hashes=[])
    records = [short, request("2", 1.0, prompt_tokens=15, output_tokens=2, block_hashes=[]), asked("3", 2.0, [1], "a")]
    analysis = analyse_chains(run_of(records, block_size=16))
    assert analysis is not None
    assert analysis.curve.complete_chains == 2


def test_curve_and_counts_have_equal_hits() -> None:
    run = read_run(CAPTURE)
    metrics, analysis = measure_run(run), analyse_chains(run)
    assert analysis is not None
    simulated = metrics.hits.simulated["all"].tokens
    assert int(analysis.curve.hit_tokens[-1]) == simulated > 0
    assert metrics.cache is not None
    assert analysis.curve.hits_at(metrics.cache.knee_blocks or 0) >= KNEE_SHARE * analysis.curve.max_hit_blocks
    assert analysis.curve.hits_at((metrics.cache.knee_blocks or 0) - 1) < KNEE_SHARE * analysis.curve.max_hit_blocks
    assert metrics.cache.engine_share == pytest.approx(1.0)
