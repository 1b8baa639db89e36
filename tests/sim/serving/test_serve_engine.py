"""The real-time engine in this process, at maximum speed: exact times of the virtual clock."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest
from librt.vecs import vec
from mypy_extensions import i64

from engines.routing import parse_route
from sim.latency.modelfile import Model, make_model
from sim.latency.noise import Noise
from sim.serving.fields import GenerationFields
from sim.serving.output import Generation, Output
from sim.serving.realtime import RealTimeEngine
from sim.serving.service import Fleet
from sim.vllm.config import EngineConfig
from sim.vllm.request import Request
from tests.sim.oracles.integrity import check_engine

STEP = {
    "t0_ms": 4.0,
    "per_prefill_token_ms": 0.5,
    "per_attention_token2_ms": 0.0,
    "per_decode_ms": 1.0,
    "per_kv_token_ms": 0.0,
}
CONFIG = EngineConfig(
    num_gpu_blocks=33, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=False
)
MODEL = make_model({**STEP, "frontend_base_ms": 10.0, "frontend_ms_per_prompt_token": 0.25}, CONFIG)


def generation(prompt_tokens: int, output_tokens: int, first_key: int) -> Generation:
    blocks = (prompt_tokens + output_tokens - 1) // CONFIG.block_size
    keys = vec[i64](range(first_key, first_key + blocks))
    request = Request(f"r{first_key}", prompt_tokens, output_tokens, keys, num_keys=blocks)
    return Generation(request, Output([7] * output_tokens, "length"), lambda _: None)


def with_running(
    model: Model, use: Callable[[RealTimeEngine], Awaitable[None]], speed: float | None = None
) -> RealTimeEngine:
    """Run ``use`` beside the engine's loop; gives the engine."""

    async def main() -> RealTimeEngine:
        engine = RealTimeEngine(model, speed=speed)
        stepping = asyncio.create_task(engine.run())
        await use(engine)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        return engine

    return asyncio.run(main())


async def until(engine: RealTimeEngine, condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the engine only lives between turns of this loop
        await asyncio.sleep(0)
    engine.flush()


def test_clock_adds_frontend_prefill_and_decode_times() -> None:
    async def use(engine: RealTimeEngine) -> None:
        submitted = generation(prompt_tokens=8, output_tokens=4, first_key=100)
        engine.submit(submitted)
        await until(engine, lambda: submitted.outcome is not None)
        # Front end 10 + 8 × 0.25 = 12; prefill 4 + 8 × 0.5 = 8; three decodes of 4 + 1.
        assert submitted.token_ms == [20.0, 35.0]
        assert engine.now_ms == 35.0
        two = generation(prompt_tokens=8, output_tokens=1, first_key=100)
        engine.submit(two)
        await until(engine, lambda: two.outcome is not None)
        # At the end of the last step; its prefix is cached but for the block of its last token.
        assert two.request.cached_tokens == 4
        assert two.token_ms[0] == 35.0 + 12.0 + 4.0 + 4 * 0.5

    engine = with_running(MODEL, use)
    check_engine(engine)
    assert engine.counters.steps == 5
    assert engine.counters.generation_tokens == 5
    assert engine.counters.cached_prompt_tokens == 4


def test_concurrent_arrivals_with_a_serial_api_server() -> None:
    arrivals: list[list[float]] = []

    async def use(engine: RealTimeEngine) -> None:
        both = [generation(8, 2, first_key) for first_key in (100, 200)]
        for submitted in both:
            engine.submit(submitted)
        await until(engine, lambda: all(submitted.outcome is not None for submitted in both))
        arrivals.append([submitted.token_ms[0] for submitted in both])

    with_running(MODEL, use)
    serial = msgspec.structs.replace(MODEL, frontend_placement="serial")
    with_running(serial, use)
    # Parallel: both enter at 12 and share one prefill of 16 tokens. Serial: the second enters at 24, when the first
    # has been prefilled (at 20) and is decoding (until 25); then it is prefilled alone.
    assert arrivals == [[24.0, 24.0], [20.0, 33.0]]


def test_async_scheduling_delays_an_arrival() -> None:
    seen: dict[bool, float] = {}

    def late_arrival(ahead: bool) -> Callable[[RealTimeEngine], Awaitable[None]]:
        async def use(engine: RealTimeEngine) -> None:
            early, late = generation(8, 12, 100), generation(4, 1, 200)
            engine.submit(early)
            await until(engine, lambda: early.delivered == 2)
            engine.submit(late)
            await until(engine, lambda: late.outcome is not None and early.outcome is not None)
            seen[ahead] = late.token_ms[0] - late.arrival_ms

        return use

    for ahead in (False, True):
        config = replace(CONFIG, async_scheduling=ahead)
        with_running(msgspec.structs.replace(MODEL, engine=config), late_arrival(ahead))
    assert seen[True] - seen[False] == 5.0  # one decode step


def test_abort_frees_blocks_in_any_state() -> None:
    async def use(engine: RealTimeEngine) -> None:
        running, entering = generation(8, 40, 100), generation(8, 40, 200)
        engine.submit(running)
        await until(engine, lambda: running.delivered == 3)
        engine.submit(entering)
        assert engine.num_running == 1
        assert engine.kv_usage > 0.0
        assert not engine.reset_prefix_cache()
        for aborted in (running, entering):
            engine.abort(aborted)
        await until(engine, lambda: running.outcome == entering.outcome == "aborted")
        check_engine(engine)
        assert (engine.num_running, engine.num_waiting, engine.kv_usage) == (0, 0, 0.0)
        assert engine.reset_prefix_cache()
        # The engine continues with the remaining requests.
        after = generation(8, 2, 100)
        engine.submit(after)
        await until(engine, lambda: after.outcome == "finished")
        assert after.request.cached_tokens == 0

    engine = with_running(MODEL, use)
    assert engine.counters.finished == {"stop": 0, "length": 1, "abort": 2}


@pytest.mark.parametrize("ahead", [False, True])
def test_more_requests_than_the_pool_finish(ahead: bool) -> None:
    # Each ends with 15 blocks of 32: two at a time grow until one of them is preempted.
    config = replace(CONFIG, async_scheduling=ahead)

    async def use(engine: RealTimeEngine) -> None:
        many = [generation(8, 53, 1000 * number) for number in range(1, 7)]
        for submitted in many:
            engine.submit(submitted)
        while not all(submitted.outcome == "finished" for submitted in many):
            check_engine(engine)
            await asyncio.sleep(0)
        assert [submitted.delivered for submitted in many] == [53] * 6

    engine = with_running(msgspec.structs.replace(MODEL, engine=config), use)
    assert engine.counters.preemptions > 0
    assert engine.counters.generation_tokens == 6 * 53
    assert engine.kv_usage == 0.0


def test_noise_applies_to_api_server_and_steps() -> None:
    # Constant tables, so whatever is drawn: the front end takes half of what the model says, steps of 8 ms (the
    # prefill's) twice and of 5 ms three times as long.
    levels = len(Noise().levels)
    noise = Noise(
        step_ms=(5.0, 8.0),
        step_log_ratio=((math.log(3.0),) * levels, (math.log(2.0),) * levels),
        frontend_log_ratio=(math.log(0.5),) * levels,
    )

    async def use(engine: RealTimeEngine) -> None:
        submitted = generation(prompt_tokens=8, output_tokens=4, first_key=100)
        engine.submit(submitted)
        await until(engine, lambda: submitted.outcome is not None)
        assert submitted.token_ms == [pytest.approx(6.0 + 2 * 8.0), pytest.approx(22.0 + 3 * 15.0)]

    with_running(msgspec.structs.replace(MODEL, noise=noise), use)


def test_sequential_client_is_independent_of_speed() -> None:
    """A conversation of three turns: cached tokens, and token times after each request."""
    levels = len(Noise().levels)
    spread = tuple(level / 9 for level in range(levels))
    noisy = msgspec.structs.replace(MODEL, noise=Noise(step_log_ratio=(spread,), frontend_log_ratio=spread))
    seen: dict[float | None, list[tuple[int | None, list[float]]]] = {}

    def conversation(speed: float | None) -> Callable[[RealTimeEngine], Awaitable[None]]:
        async def use(engine: RealTimeEngine) -> None:
            seen[speed] = []
            for turn in range(3):
                submitted = generation(prompt_tokens=8 + 12 * turn, output_tokens=5, first_key=100)
                engine.submit(submitted)
                await until(engine, lambda: submitted.outcome is not None)  # noqa: B023 - awaited before the next turn
                times_ms = [time_ms - submitted.arrival_ms for time_ms in submitted.token_ms]
                seen[speed].append((submitted.request.cached_tokens, times_ms))

        return use

    for speed in (None, 20.0, 100.0):
        with_running(noisy, conversation(speed), speed)
    assert [cached for cached, _ in seen[None]] == [0, 12, 24]
    for speed in (20.0, 100.0):
        assert [cached for cached, _ in seen[speed]] == [cached for cached, _ in seen[None]]
        for (_, at_speed_ms), (_, at_once_ms) in zip(seen[speed], seen[None], strict=True):
            assert at_speed_ms == pytest.approx(at_once_ms)


def test_router_counts_in_sim_serve() -> None:
    async def use() -> list[list[tuple[int, float]]]:
        fleet = Fleet(MODEL, 2, parse_route("round-robin"), speed=None, noise_seed=None)
        stepping = asyncio.create_task(fleet.run())
        seen = []

        def see() -> None:
            seen.append([(engine.requests, engine.prefill_tokens) for engine in fleet.router.engines])

        # Two choices of one prompt, and a request that is aborted before its first token.
        pair, lone = [generation(8, 3, 100), generation(8, 5, 100)], generation(20, 9, 300)
        assert fleet.route("s", GenerationFields(), pair) == 0
        assert fleet.route("s", GenerationFields(), [lone]) == 1
        see()
        for submitted in pair:
            fleet.engines[0].submit(submitted)
        fleet.engines[1].submit(lone)
        fleet.engines[1].abort(lone)
        await until(fleet.engines[0], lambda: pair[0].outcome is not None)
        see()
        await until(fleet.engines[0], lambda: pair[1].outcome is not None)
        see()
        fleet.router.check_integrity()
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        return seen

    assert asyncio.run(use()) == [[(1, 8.0), (1, 20.0)], [(1, 0.0), (0, 0.0)], [(0, 0.0), (0, 0.0)]]
