"""The scheduler against the slow engine, step by step, on random workloads with sharing, pressure and preemption."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.vllm.config import EngineConfig
from tests.sim.oracles import slow_engine
from tests.sim.oracles.integrity import check_readable
from tests.sim.oracles.readable.request import Request
from tests.sim.oracles.readable.scheduler import Scheduler, Step


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    output: int
    family: int
    """Requests of a family share a chain as far as both reach; family 0 shares with nobody."""
    shared_blocks: int


@st.composite
def workloads(draw: st.DrawFn) -> tuple[EngineConfig, list[Arrival]]:
    block_size = draw(st.sampled_from([1, 2, 4]))
    usable = draw(st.integers(4, 24))
    config = EngineConfig(
        num_gpu_blocks=usable + 1,
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 40)),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        async_scheduling=draw(st.booleans()),
    )
    most = usable * block_size
    arrivals = []
    for _ in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, most))
        arrivals.append(
            Arrival(
                step=draw(st.integers(0, 30)),
                prompt=prompt,
                output=draw(st.integers(1, max(most - prompt, 1))),
                family=draw(st.integers(0, 2)),
                shared_blocks=draw(st.integers(0, usable)),
            )
        )
    return config, sorted(arrivals, key=lambda arrival: arrival.step)


def chain(number: int, arrival: Arrival, block_size: int) -> list[int]:
    full = (arrival.prompt + arrival.output - 1) // block_size
    shared = min(arrival.shared_blocks, full) if arrival.family else 0
    private = [1_000_000 + 1000 * number + position for position in range(shared, full)]
    return [1000 * arrival.family + position for position in range(shared)] + private


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_every_step_equals_the_slow_engine(workload: tuple[EngineConfig, list[Arrival]]) -> None:
    config, arrivals = workload
    fast = Scheduler(config)
    slow = slow_engine.SlowEngine(
        usable=config.usable_blocks,
        block_size=config.block_size,
        seqs=config.max_num_seqs,
        budget=config.max_num_batched_tokens,
        caching=config.enable_prefix_caching,
    )
    requests = []
    for number, arrival in enumerate(arrivals):
        keys = chain(number, arrival, config.block_size)
        request = Request(f"r{number}", arrival.prompt, arrival.output, keys)
        assume(fast.accepts(request))
        twin = slow_engine.SlowRequest(request.request_id, arrival.prompt, arrival.output, keys)
        requests.append((arrival.step, request, twin))
    pending = deque(requests)
    in_flight: deque[tuple[Step, Any]] = deque()
    steps = 0
    while pending or fast.has_work:
        while pending and pending[0][0] <= steps:
            _, request, twin = pending.popleft()
            fast.add(request)
            slow.waiting.append(twin)
        ours, theirs = fast.schedule(), slow.schedule()
        assert [(s.request.request_id, s.num_tokens, s.depth, s.samples) for s in ours.scheduled] == [
            (twin.name, tokens, depth, samples) for twin, tokens, depth, samples in theirs["shares"]
        ]
        assert [request.request_id for request in ours.preempted] == theirs["preempted"]
        compare(fast, slow)
        in_flight.append((ours, theirs))
        if len(in_flight) == (2 if config.async_scheduling else 1):
            ours, theirs = in_flight.popleft()
            assert [request.request_id for request in fast.finish_step(ours)] == slow.finish(theirs)
            compare(fast, slow)
        steps += 1
        assert steps < 5000
    assert all(request.cached_tokens == twin.cached for _, request, twin in requests)


def compare(fast: Scheduler, slow: Any) -> None:
    check_readable(fast)
    assert fast.pool.free_order() == slow.free
    assert {block: fast.pool.key_of(block) for block in slow.holders if fast.pool.key_of(block) is not None} == slow.key
    assert fast.pool.evicted_blocks == slow.evictions
    assert [request.request_id for request in fast.waiting] == [twin.name for twin in slow.waiting]
    assert [request.request_id for request in fast.running] == [twin.name for twin in slow.running]
