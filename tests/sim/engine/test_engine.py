"""The virtual clock: literal times of small loads, and long loads against the run without fast-forward."""

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.latency.modelfile import Model, make_model
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import plan_arrivals
from tests.sim.oracles.arrival import objects
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import Simulation, predicted_records
from tracefile.records.schema import BlockHash, Meta, Record, RequestId, SessionId

CONFIG = EngineConfig(
    num_gpu_blocks=101, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=False
)
# A step needs 10 ms, a prompt token 1, a decoding request 2, the front end 3: every time below is an integer.
STEP = {
    "t0_ms": 10.0,
    "per_prefill_token_ms": 1.0,
    "per_attention_token2_ms": 0.0,
    "per_decode_ms": 2.0,
    "per_kv_token_ms": 0.0,
}
MODEL = make_model({**STEP, "frontend_base_ms": 3.0}, CONFIG)


def request(name: str, arrival_ms: float, prompt: int, output: int, **fields: object) -> Record:
    blocks = (prompt + output - 1) // 4
    chain = [BlockHash(hash((name, block)) & 0xFFFFFFFF) for block in range(blocks)]
    known: dict[str, object] = {"block_hashes": chain[: prompt // 4], "output_block_hashes": chain[prompt // 4 :]}
    shape: dict[str, object] = {"prompt_tokens": prompt, "output_tokens": output, "arrival_ms": arrival_ms}
    return Record(request_id=RequestId(name), **(known | shape | fields))  # type: ignore[arg-type]


def simulate(records: list[Record], model: Model = MODEL, **options: object) -> Simulation:
    config = options.pop("config", model.engine)
    assert isinstance(config, EngineConfig)
    plan_options = {name: options.pop(name) for name in ("cold_prompts", "replay_sessions") if name in options}
    arrivals = objects(plan_arrivals(Meta(block_size=4), records, config.block_size, **plan_options))  # type: ignore[arg-type]
    simulation = Engine(arrivals, config, model, **options).run()  # type: ignore[arg-type]
    simulation.timeline.check_integrity()
    return simulation


def predict(records: list[Record], **options: object) -> dict[str, Record]:
    return {record.request_id: record for record in predicted_records(simulate(records, **options))}  # type: ignore[arg-type]


def test_single_request() -> None:
    # Enters at 3; 20 prompt tokens at 16 a step: 26 + 14 ms; then two decodes of 12.
    seen = predict([request("a", 100.0, 20, 3)])["a"]
    assert (seen.ttft_ms, seen.itl_ms, seen.e2e_ms) == (43.0, [12.0, 12.0], 67.0)
    assert (seen.cached_tokens, seen.output_tokens, seen.concurrency) == (0, 3, 1)
    assert seen.end_ms() == 167.0


def test_delivery_of_a_first_token_delays_later_tokens() -> None:
    model = make_model({**STEP, "frontend_base_ms": 3.0, "delivery_ms_per_prompt_token": 0.5}, CONFIG)
    # a: its step ends at 17, seen at 19. b: 29–49 with a's third token, both seen 20 × 0.5 later; the decodes that end
    # at 63 and 75 are on time.
    load = [request("a", 0.0, 4, 5), request("b", 20.0, 8, 3)]
    seen = predict(load, model=model)
    assert (seen["a"].ttft_ms, seen["a"].itl_ms) == (19.0, [10.0, 24.0, 10.0, 14.0])
    assert (seen["b"].ttft_ms, seen["b"].itl_ms, seen["b"].e2e_ms) == (33.0, [10.0, 14.0], 57.0)
    # So long that later tokens come with it; and a client that leaves before sees none.
    slow = make_model({**STEP, "frontend_base_ms": 3.0, "delivery_ms_per_prompt_token": 5.0}, CONFIG)
    assert predict(load[:1], model=slow)["a"].itl_ms == [0.0, 4.0, 12.0, 12.0]
    gone = request("a", 0.0, 4, 5, status="client_abort", e2e_ms=36.0)
    left = predict([gone], model=slow)["a"]
    assert (left.status, left.ttft_ms, left.output_tokens) == ("client_abort", None, 0)


def test_delivery_on_a_shared_core_slows_the_next_step() -> None:
    costs = {**STEP, "frontend_base_ms": 3.0, "delivery_ms_per_prompt_token": 0.5}
    model = make_model(costs, CONFIG, placement="shared_core")
    # Ends at 17; its 2 ms last 4 beside the next step of 12 + 2. The last token of a request is delivered at once.
    seen = predict([request("a", 0.0, 4, 3), request("b", 200.0, 4, 1)], model=model)
    assert (seen["a"].ttft_ms, seen["a"].itl_ms) == (21.0, [10.0, 12.0])
    assert seen["b"].ttft_ms == 19.0


def test_arrival_waits_for_the_step_in_flight() -> None:
    # a: steps 3–17 (4 tokens), 17–29, … b arrives at 17, enters at 20: waits until 29, runs 29–49 (10 + 2 + 8).
    seen = predict([request("a", 0.0, 4, 4), request("b", 17.0, 8, 2)])
    assert (seen["a"].ttft_ms, seen["a"].itl_ms) == (17.0, [12.0, 20.0, 14.0])
    assert (seen["b"].ttft_ms, seen["b"].itl_ms) == (32.0, [14.0])
    assert (seen["a"].concurrency, seen["b"].concurrency) == (1, 2)


def test_async_scheduling_delays_an_arrival_by_a_step() -> None:
    config = EngineConfig(num_gpu_blocks=101, block_size=4, max_num_batched_tokens=16, async_scheduling=True)
    seen = predict([request("a", 0.0, 4, 5), request("b", 17.0, 8, 2)], config=config)
    # The step 29–41 was composed at 17, before b entered at 20; b runs 41–61.
    assert (seen["a"].ttft_ms, seen["a"].itl_ms) == (17.0, [12.0, 12.0, 20.0, 14.0])
    assert (seen["b"].ttft_ms, seen["b"].itl_ms) == (44.0, [14.0])


def test_warm_prompt_costs_the_uncached_tokens() -> None:
    first = request("a", 0.0, 8, 5)
    chain = (first.block_hashes or []) + (first.output_block_hashes or [])
    # The output's full block (tokens 8–11) is hit too: 12 of 14 tokens are there.
    second = request("b", 1000.0, 14, 1, block_hashes=chain, output_block_hashes=[])
    seen = predict([first, second])
    assert (seen["b"].cached_tokens, seen["b"].ttft_ms) == (12, 3 + 10 + 2)
    cold = predict([first, second], cold_prompts=True)
    assert (cold["b"].cached_tokens, cold["b"].ttft_ms) == (0, 3 + 10 + 14)


def test_later_turn_waits_for_the_parents_end() -> None:
    first = request("a", 5.0, 4, 1, session_id=SessionId("s"), turn=1, e2e_ms=2.0)
    second = request("b", 57.0, 4, 1, session_id=SessionId("s"), parent_id=RequestId("a"), turn=2, think_ms=50.0)
    paced = predict([first, second], replay_sessions=True)["b"]
    assert paced.arrival_ms == 5.0 + 17.0 + 50.0
    assert predict([first, second])["b"].arrival_ms == 57.0


def test_serial_api_server_handles_a_single_request_at_a_time() -> None:
    model = make_model(
        {**STEP, "frontend_base_ms": 3.0, "frontend_ms_per_prompt_token": 1.0}, CONFIG, placement="serial"
    )
    runs = simulate([request(name, 0.0, 4, 1) for name in "abc"], model).runs
    assert [request_run.entry_ms for request_run in runs] == [7.0, 14.0, 21.0]


def test_api_server_and_steps_share_a_core() -> None:
    model = make_model({**STEP, "frontend_base_ms": 3.0}, CONFIG, placement="shared_core")
    simulation = simulate([request("a", 0.0, 4, 3), request("b", 19.0, 8, 1)], model)
    # a enters at 3, its prompt needs 3–17. In the decode of 12 ms from 17 on, b arrives at 19: its 3 ms take 6, to 25,
    # and the step ends 3 ms later, at 32. Then 10 + 2 + 8 ms for both.
    a, b = simulation.runs
    assert [request_run.entry_ms for request_run in (a, b)] == [3.0, 25.0]
    assert (a.ttft_ms, a.itl_ms.tolist(), b.ttft_ms) == (17.0, [15.0, 20.0], 33.0)
    # The front end's share of each span: idle before a, in the step beside b.
    assert simulation.timeline.rows[0][-2:] == [1.0, 4.0]
    assert simulation.timeline.rows[2][-2:] == [1.0, 8.0]
    assert simulation.timeline.rows[3][-2:] == [0.0, 0.0]


def test_abort_at_the_recorded_time() -> None:
    aborted = request("a", 0.0, 4, 0, status="client_abort", max_tokens=100, e2e_ms=50.0)
    seen = predict([aborted, request("b", 0.0, 4, 1)])
    # Steps 3–21 (both prompts), then decodes of 12 ms: tokens at 21, 33, 45; the abort is at 50.
    assert (seen["a"].status, seen["a"].e2e_ms, seen["a"].ttft_ms) == ("client_abort", 50.0, 21.0)
    assert seen["a"].itl_ms == [12.0, 12.0]
    before_entry = predict([request("a", 0.0, 4, 0, status="client_abort", max_tokens=9, e2e_ms=2.0)])["a"]
    assert (before_entry.status, before_entry.ttft_ms, before_entry.e2e_ms) == ("client_abort", None, 2.0)


def test_an_error_before_the_engine_is_copied() -> None:
    refused = request("a", 0.0, 4, 0, status="error", http_status=429, error="http_429", e2e_ms=1.5)
    seen = predict([refused])["a"]
    assert (seen.status, seen.http_status, seen.e2e_ms, seen.cached_tokens) == ("error", 429, 1.5, None)


def test_too_long_request_fails_with_the_session() -> None:
    long = request("a", 0.0, 1000, 1, session_id=SessionId("s"), turn=1)
    later = request("b", 9.0, 4, 1, session_id=SessionId("s"), parent_id=RequestId("a"), turn=2, think_ms=1.0)
    seen = predict([long, later, request("c", 0.0, 4, 1)], replay_sessions=True)
    assert (seen["a"].status, seen["a"].error) == ("error", "exceeds_engine")
    assert (seen["b"].status, seen["b"].error) == ("error", "parent_failed")
    assert (seen["c"].status, seen["c"].ttft_ms) == ("ok", 17.0)


def random_load(seed: int, requests: int) -> list[Record]:
    rng = random.Random(seed)
    records: list[Record] = []
    for number in range(requests):
        prompt, output = rng.randrange(1, 60), rng.randrange(1, 40)
        record = request(f"r{number}", rng.uniform(0, requests * 30), prompt, output)
        if records and rng.random() < 0.5:
            shared = rng.choice(records).block_hashes or []
            local = record.block_hashes or []
            retained = rng.randrange(min(len(shared), len(local)) + 1)
            record.block_hashes = shared[:retained] + local[retained:]
        if rng.random() < 0.1:
            record.status, record.e2e_ms = "client_abort", rng.uniform(0, 300)
        elif records and rng.random() < 0.3:
            record.parent_id, record.think_ms = rng.choice(records).request_id, rng.uniform(0, 100)
        records.append(record)
    return records


def outcome(simulation: Simulation) -> list[object]:
    runs = [
        (
            request_run.outcome,
            request_run.arrival_ms,
            request_run.token_steps,
            request_run.ttft_ms,
            request_run.itl_ms.tolist(),
            request_run.e2e_ms,
        )
        for request_run in simulation.runs
    ]
    return [runs, simulation.timeline.starts_ms, simulation.timeline.ends_ms, simulation.timeline.rows]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.sampled_from([27, 40, 101]),
    block_size=st.sampled_from([4, 16]),
    placement=st.sampled_from(get_args(FrontendPlacement)),
)
def test_fast_forward_equals_every_step(seed: int, blocks: int, block_size: int, placement: FrontendPlacement) -> None:
    config = EngineConfig(
        num_gpu_blocks=blocks,
        block_size=block_size,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        async_scheduling=False,
    )
    step = {
        "t0_ms": 4.3,
        "per_prefill_token_ms": 0.13,
        "per_attention_token2_ms": 1e-3,
        "per_decode_ms": 0.99,
        "per_kv_token_ms": 3e-3,
    }
    frontend = {"frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01}
    model = make_model({**step, **frontend}, config, placement=placement)
    load = random_load(seed, 25)
    quick = simulate(load, model, replay_sessions=True, seed=1)
    slow = simulate(load, model, replay_sessions=True, seed=1, fast_forward=False)
    assert outcome(quick) == outcome(slow)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), asynchronous=st.booleans())
def test_all_requests_finish_and_tokens_add_up(seed: int, asynchronous: bool) -> None:
    config = EngineConfig(
        num_gpu_blocks=30, block_size=4, max_num_seqs=3, max_num_batched_tokens=16, async_scheduling=asynchronous
    )
    load = random_load(seed, 25)
    seen = predict(load, config=config, replay_sessions=True)
    assert len(seen) == len(load)
    for record in load:
        got = seen[record.request_id]
        if got.status == "ok":
            assert got.ttft_ms is not None
            assert len(got.itl_ms) + 1 == got.output_tokens == (record.output_tokens or 0)
            assert got.e2e_ms == pytest.approx(got.ttft_ms + sum(got.itl_ms), abs=0.01)
