"""A schedule reconstructed from a capture equals the engine's schedule where tokens determine it."""

import msgspec
import pytest

from sim.vllm.config import EngineConfig
from tests.sim import captured_loads
from tracefile.records.schema import BlockHash, Record, RequestId


@pytest.mark.parametrize(
    ("seeds", "ahead", "late_ms"), [(range(16), False, 0.0), (range(1, 9), True, 0.0), (range(1, 7), False, 2.0)]
)
def test_admissions_equal_the_engine(seeds: range, ahead: bool, late_ms: float) -> None:
    """Neither the latency model nor cached tokens are given. Delays of late reads are shorter than any step."""
    for seed in seeds:
        engine = captured_loads.random_engine(seed, async_scheduling=ahead)
        frontend_ms = 0.0 if ahead or late_ms else 7.0 * (seed % 2)
        requests = captured_loads.RandomLoad(seed).records(50)
        truth = captured_loads.captured(requests, engine, frontend_ms=frontend_ms)
        seen = captured_loads.late_reads(truth, seed, late_ms) if late_ms else truth
        schedule = captured_loads.reconstructed(seen, engine)
        assert ahead or late_ms or schedule.evicted_blocks > 0  # else nothing was put to the test
        assert [request.cached_tokens for request in schedule.requests] == [record.cached_tokens for record in truth]


def test_preemptions_come_from_the_rules() -> None:
    """Two requests of two blocks each in 5 usable blocks: only a single third block fits."""
    engine = EngineConfig(num_gpu_blocks=6, block_size=32, async_scheduling=False)
    records = [make_record(name, at_ms, 60, 40, first) for name, at_ms, first in [("a", 0.0, 1), ("b", 1.0, 11)]]
    truth = captured_loads.captured(records, engine)
    assert sorted(record.preemptions or 0 for record in truth) == [0, 1]
    blind = [msgspec.structs.replace(record, preemptions=None, queue_ms=None) for record in truth]
    schedule = captured_loads.reconstructed(blind, engine)
    assert [request.preemptions for request in schedule.requests] == [record.preemptions for record in truth]


def test_reported_cached_tokens_are_not_used() -> None:
    engine = captured_loads.random_engine(3)
    truth = captured_loads.captured(captured_loads.RandomLoad(3).records(30), engine)
    wrong = [msgspec.structs.replace(record, cached_tokens=0) for record in truth]
    schedule = captured_loads.reconstructed(wrong, engine)
    assert [request.cached_tokens for request in schedule.requests] == [record.cached_tokens for record in truth]


def test_abort_frees_blocks_at_the_abort_time() -> None:
    """``a`` leaves long before its end and before ``b`` arrives, which needs all blocks; ``c`` hits no block of a."""
    engine = EngineConfig(num_gpu_blocks=6, block_size=32, async_scheduling=False)
    left = msgspec.structs.replace(
        make_record("a", 0.0, 60, 100, 1),
        **{"status": "client_abort", "ttft_ms": 10.0, "e2e_ms": 15.0, "output_tokens": 1, "max_tokens": 100},
    )
    big = served(make_record("b", 20.0, 159, 1, 11), ttft_ms=30.0)
    again = served(make_record("c", 100.0, 60, 1, 1), ttft_ms=10.0)
    schedule = captured_loads.reconstructed([left, big, again], engine)
    assert [request.admitted_ms for request in schedule.requests] == [0.0, 20.0, 100.0]
    assert [request.cached_tokens for request in schedule.requests] == [0, 0, 0]


def test_waiting_client_keeps_the_blocks() -> None:
    """No read tells when ``a`` computes on, but it is there until its client leaves: ``b``, which needs all, waits."""
    engine = EngineConfig(num_gpu_blocks=6, block_size=32, async_scheduling=False)
    stays = msgspec.structs.replace(
        make_record("a", 0.0, 60, 100, 1),
        **{"status": "client_abort", "ttft_ms": 10.0, "e2e_ms": 1000.0, "output_tokens": 1, "max_tokens": 100},
    )
    big = served(make_record("b", 500.0, 159, 1, 11), ttft_ms=520.0)
    schedule = captured_loads.reconstructed([stays, big], engine)
    assert [request.admitted_ms for request in schedule.requests] == [0.0, 1000.0]


def test_non_streamed_response_keeps_the_blocks() -> None:
    """Not streamed: only the end is known, and a concurrent second request shares the prompt."""
    engine = EngineConfig(num_gpu_blocks=40, block_size=32, async_scheduling=False)
    complete = msgspec.structs.replace(make_record("a", 0.0, 70, 20, 1), stream=False, e2e_ms=400.0)
    beside = served(make_record("b", 200.0, 70, 1, 1), ttft_ms=20.0)
    schedule = captured_loads.reconstructed([complete, beside], engine)
    assert [request.cached_tokens for request in schedule.requests] == [0, 64]


def make_record(name: str, arrival_ms: float, prompt: int, output: int, first: int) -> Record:
    """A request whose blocks have the keys from ``first`` on."""
    chain = [BlockHash(first + number) for number in range((prompt + output - 1) // 32)]
    return Record(
        request_id=RequestId(name),
        arrival_ms=arrival_ms,
        stream=True,
        http_status=200,
        prompt_tokens=prompt,
        output_tokens=output,
        block_hashes=chain[: prompt // 32],
        output_block_hashes=chain[prompt // 32 :],
    )


def served(record: Record, ttft_ms: float) -> Record:
    return msgspec.structs.replace(record, ttft_ms=ttft_ms, e2e_ms=ttft_ms)
