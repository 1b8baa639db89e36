"""Utilization of an engine, on loads whose utilization is known by hand."""

import random

import numpy as np
import pytest

from sim.forecast.saturation import run_point, utilization_of
from sim.latency.modelfile import Model, make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals, plan_arrivals
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

PROMPT = 1_000


def model(
    t0_ms: float = 10.0, decode_ms: float = 0.0, max_num_seqs: int = 256, max_num_batched_tokens: int = PROMPT
) -> Model:
    """A step of 10 ms and 0.1 ms for a prompt token: 1,000 prompt tokens, alone in a step, need 110 ms."""
    step = {"t0_ms": t0_ms, "per_prefill_token_ms": 0.1, "per_decode_ms": decode_ms}
    config = EngineConfig(
        num_gpu_blocks=20_000,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=False,
    )
    return make_model(step, config)


def poisson(count: int, spacing_ms: float, output_tokens: int = 1, seed: int = 0) -> Arrivals:
    """Unshared prompts at random times, exactly ``count`` − 1 spacings from the first to the last."""
    rng = random.Random(seed)
    last_ms = (count - 1) * spacing_ms
    times_ms = sorted([0.0, last_ms, *(rng.uniform(0, last_ms) for _ in range(count - 2))])
    records = [
        Record(
            request_id=RequestId(f"r{number}"),
            arrival_ms=time_ms,
            prompt_tokens=PROMPT,
            output_tokens=output_tokens,
            block_hashes=[BlockHash(number * 100 + block) for block in range(PROMPT // 16)],
        )
        for number, time_ms in enumerate(times_ms)
    ]
    return plan_arrivals(Meta(block_size=16), records, 16)


def load(arrivals: Arrivals, of: Model) -> float:
    return utilization_of(run_point(arrivals, of.engine, of), arrivals, of.engine, of)


@pytest.mark.parametrize("utilization", [0.2, 0.9, 3.0])
def test_utilization_of_a_single_server(utilization: float) -> None:
    """M/D/1: a step serves one prompt, in 110 ms, so a prompt every 110 / ρ ms is a load of ρ."""
    assert load(poisson(200, 110.0 / utilization), model()) == pytest.approx(utilization, rel=1e-6)


def test_decodes_cost_their_share_of_a_full_batch() -> None:
    """100 tokens each, at 1 ms a request beside a step's 10: in a batch of 8 a token takes 18 / 8 ms of the engine, so
    that 10 requests a second ask for a second of prompts, a second of tokens, and steps of batches of 8."""
    utilization = load(poisson(400, 100.0, output_tokens=101), model(decode_ms=1.0, max_num_seqs=8))
    # 8 requests: 800 ms of prompt in 8 steps and 101 steps between them, less what prompts' and tokens' steps share.
    assert utilization == pytest.approx(2.0 / (1_600 / (1_600 + 10 * 105)), rel=0.06)


def test_requests_of_a_single_step() -> None:
    """20 prompts in one step of 2,010 ms."""
    utilization = load(poisson(20, 1_000.0), model(max_num_batched_tokens=20 * PROMPT))
    assert utilization == pytest.approx(0.1 / (2_000 / 2_010), rel=1e-6)


def test_single_arrival_has_no_rate() -> None:
    assert np.isnan(load(poisson(2, 10.0).select(np.array([0])), model()))


def test_engine_without_step_overhead() -> None:
    """A prompt of 100 ms every millisecond."""
    assert load(poisson(50, 1.0), model(t0_ms=0.0)) == pytest.approx(100.0)
