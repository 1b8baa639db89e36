"""The scheduler's literal steps, with the rule each follows from (docs/simulator.md)."""

import numpy as np
import pytest

from measure.cache.vectors import integers
from sim.engine.simulation import make_scheduler
from sim.vllm.config import EngineConfig
from sim.vllm.kvcache import SingleGroupCache
from sim.vllm.request import FINISHED, NOT_ADMITTED, WAITING, Request
from sim.vllm.scheduler import Scheduler, Step
from sim.vllm.segments import SegmentPool
from tests.sim.oracles.integrity import check_scheduler
from tests.sim.oracles.stepped_scheduler import Content, free_contents, holders
from tracefile.records.errors import InputError


def engine(usable: int = 20, **settings: int | bool | str) -> Scheduler:
    defaults: dict[str, int | bool | str] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return make_scheduler(EngineConfig(num_gpu_blocks=usable + 1, **{**defaults, **settings}))  # type: ignore[arg-type]


def pool_of(scheduler: Scheduler) -> SegmentPool:
    assert isinstance(scheduler.cache, SingleGroupCache)
    return scheduler.cache.pool


def request(
    name: str, prompt: int, output: int, family: int = 0, *, keys: int = 9, limit: int = 0, hits: int = 9
) -> Request:
    """Requests of one family share their chain; each block's key is the family and its depth. ``limit``: of tokens."""
    chain = integers(np.arange(keys) + 1000 * family)
    index = sum(name.encode())
    return Request(name, prompt, output, chain, num_keys=keys, index=index, token_limit=limit, hit_limit=hits)


def shares(step: Step) -> list[tuple[str, int, int]]:
    return [(share.request.request_id, share.num_tokens, share.depth) for share in step.shares[: step.count]]


def schedule(scheduler: Scheduler) -> Step:
    step = Step()
    assert scheduler.schedule(step) == len(step.preempted)
    check_scheduler(scheduler)
    return step


def run_step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    step = schedule(scheduler)
    scheduler.finish_step(step)
    check_scheduler(scheduler)
    return shares(step)


def cached(scheduler: Scheduler) -> dict[Content, int]:
    """Holders of each cached block."""
    return holders(pool_of(scheduler))


def test_prompt_chunks_precede_decodes() -> None:
    scheduler = engine(max_num_batched_tokens=6)
    a = request("a", 9, 3)
    scheduler.add(a)
    assert run_step(scheduler) == [("a", 6, 0)]
    assert a.num_generated == 0  # 3 prompt tokens remain: nothing is sampled
    assert run_step(scheduler) == [("a", 3, 6)]
    assert a.num_generated == 1  # the prompt's last chunk samples the first token
    assert run_step(scheduler) == [("a", 1, 9)]
    assert run_step(scheduler) == [("a", 1, 10)]
    assert a.status == FINISHED
    assert not scheduler.has_work()
    # Rule 11: ceil((9 + 3 - 1) / 4) = 3 blocks were held, of which the two full blocks stay cached.
    assert free_contents(pool_of(scheduler)) == [None] * 18 + [(1, 0), (0, 0)]


def test_blocks_after_the_hashed_keys_are_private() -> None:
    scheduler = engine()
    scheduler.add(request("a", 9, 4, keys=1))
    while scheduler.has_work():
        run_step(scheduler)
    scheduler.add(b := request("b", 9, 4, keys=3))
    run_step(scheduler)
    assert b.cached_tokens == 4


def test_running_requests_are_scheduled_first() -> None:
    scheduler = engine(max_num_batched_tokens=6)
    scheduler.add(request("a", 4, 5, family=1))
    assert run_step(scheduler) == [("a", 4, 0)]
    scheduler.add(request("b", 9, 2, family=2))
    scheduler.add(request("c", 2, 2, family=3))
    assert run_step(scheduler) == [("a", 1, 4), ("b", 5, 0)]
    assert run_step(scheduler) == [("a", 1, 5), ("b", 4, 5), ("c", 1, 0)]


def test_blocks_are_hit_within_their_step() -> None:
    scheduler = engine(max_num_batched_tokens=32)
    scheduler.add(request("a", 10, 4))
    b = request("b", 10, 4)
    scheduler.add(b)
    # Rule 10: a's two full blocks are there when b is looked up, before anything has run.
    assert run_step(scheduler) == [("a", 10, 0), ("b", 2, 8)]
    assert b.cached_tokens == 8
    assert cached(scheduler) == {(0, 0): 2, (1, 0): 2}


def test_prefill_chunks_are_cached_separately() -> None:
    scheduler = engine(max_num_batched_tokens=5)
    scheduler.add(request("a", 12, 2))
    b = request("b", 12, 2)
    assert run_step(scheduler) == [("a", 5, 0)]
    scheduler.add(b)
    assert run_step(scheduler) == [("a", 5, 5)]
    # a computes its last 2 of 5; b hits the two blocks filled so far, 8 tokens, not the third that a fills only now …
    assert run_step(scheduler) == [("a", 2, 10), ("b", 3, 8)]
    # … which by rule 6 it could not have hit either: a prompt's last token is always computed.
    assert b.cached_tokens == 8


def test_prompt_of_full_blocks_recomputes_the_last() -> None:
    scheduler = engine()
    scheduler.add(request("a", 8, 1))
    run_step(scheduler)
    b = request("b", 8, 1)
    scheduler.add(b)
    assert run_step(scheduler) == [("b", 4, 4)]  # rule 6: at most (8 - 1) // 4 = 1 block
    assert b.cached_tokens == 4
    # Rule 7: the second copy of block 1 is cached behind the first, both with key 1.
    assert cached(scheduler) == {(0, 0): 0, (1, 0): 0, (1, 1): 0}
    assert pool_of(scheduler).lookup(request("c", 9, 1), 2) == 2


def test_admission_needs_blocks_for_the_complete_prompt() -> None:
    scheduler = engine(usable=6, max_num_batched_tokens=4)
    scheduler.add(request("a", 4, 12, family=1))
    run_step(scheduler)
    scheduler.add(request("big", 24, 1, family=2))
    scheduler.add(request("small", 1, 1, family=3))
    # Rule 9: big's 6 blocks are not free, though its first chunk's one is; small waits behind it (rule 12).
    assert run_step(scheduler) == [("a", 1, 4)]
    assert [waiting.request_id for waiting in scheduler.waiting] == ["big", "small"]


def test_idle_step_is_scheduled_once() -> None:
    step = Step()
    assert (engine().schedule_when_idle(step), step.count) == (0, 0)  # nothing to do is no reason to try again
    scheduler = engine(usable=5, max_num_batched_tokens=64)
    a, b = request("a", 8, 8, family=1), request("b", 8, 3, family=2)
    scheduler.add(a)
    scheduler.add(b)
    run_step(scheduler)
    assert scheduler.schedule_when_idle(step) == 1
    assert (shares(step), step.preempted) == ([("a", 1, 8)], [b])
    assert a.num_computed == 9


def test_free_hits_count_against_free_blocks() -> None:
    scheduler = engine(usable=6, max_num_batched_tokens=64)
    scheduler.add(request("a", 8, 1, family=1))
    run_step(scheduler)  # family 1's two blocks are cached and idle
    scheduler.add(request("b", 12, 8, family=2))
    run_step(scheduler)  # b allocates 3 blocks; 3 are free, two of them a's
    c = request("c", 16, 1, family=1)
    scheduler.add(c)
    # Rule 8: c needs 4 - 2 hits + 2 hits at reference 0 = 4 blocks and 3 are free.
    assert run_step(scheduler) == [("b", 1, 12)]
    assert c.cached_tokens == NOT_ADMITTED
    assert scheduler.stats.requests == 2  # rule 14: an attempt that fails is not counted


def test_last_running_request_is_preempted_and_recomputed() -> None:
    scheduler = engine(usable=5, max_num_batched_tokens=64)
    a, b = request("a", 8, 8, family=1), request("b", 8, 3, family=2)
    scheduler.add(a)
    scheduler.add(b)
    assert run_step(scheduler) == [("a", 8, 0), ("b", 8, 0)]  # 4 of 5 blocks
    step = schedule(scheduler)
    # Both have 9 tokens and need a third block; a gets the last one, b has to give way (rule 13) …
    assert shares(step) == [("a", 1, 8)]
    assert step.preempted == [b]
    assert (b.num_computed, b.num_generated, b.num_blocks) == (0, 1, 0)
    assert list(scheduler.waiting) == [b]
    scheduler.finish_step(step)
    # … and is looked up again over prompt + generated: its two own blocks, of which both count as the limit is
    # (9 - 1) // 4 = 2. Admitting it needs 3 - 2 + 2 = 3 blocks, and only 2 are free until a ends.
    while a.status != FINISHED:
        assert [name for name, *_ in run_step(scheduler)] == ["a"]
    step = schedule(scheduler)
    # a's decode took one of the freed blocks, so the leaf is gone and one block is hit.
    assert shares(step) == [("b", 5, 4)]
    assert step.admitted == 1
    assert (b.preemptions, b.cached_tokens) == (1, 0)  # reported: hits of the first admission
    scheduler.finish_step(step)
    assert (scheduler.stats.requests, scheduler.stats.hit_tokens) == (2, 0)  # the second admission is not counted


def test_no_admission_in_a_step_with_preemption() -> None:
    scheduler = engine(usable=5, max_num_batched_tokens=64)
    scheduler.add(request("a", 8, 4, family=1))
    scheduler.add(request("b", 8, 3, family=2))
    run_step(scheduler)
    scheduler.add(request("c", 1, 1, family=3))
    step = schedule(scheduler)
    assert [victim.request_id for victim in step.preempted] == ["b"]
    assert shares(step) == [("a", 1, 8)]  # c would fit: two blocks are free again
    assert [waiting.request_id for waiting in scheduler.waiting] == ["b", "c"]


def test_single_request_may_preempt_itself() -> None:
    # a fills the pool while b is at its end: a's next block can only come from a itself.
    scheduler = engine(usable=4, max_num_batched_tokens=64)
    b, a = request("b", 4, 4, family=2), request("a", 8, 6, family=1)
    scheduler.add(b)
    scheduler.add(a)
    run_step(scheduler)
    step = schedule(scheduler)
    assert shares(step) == [("b", 1, 4)]
    assert step.preempted == [a]
    scheduler.finish_step(step)
    while scheduler.has_work():
        run_step(scheduler)
    assert (a.num_generated, b.num_generated) == (6, 4)


def test_async_scheduling_delays_an_arrival_by_a_step() -> None:
    scheduler = engine()
    a = request("a", 4, 4, family=1)
    scheduler.add(a)
    first = schedule(scheduler)
    second = schedule(scheduler)  # while the first runs: on a placeholder for the token it will sample
    assert (shares(first), shares(second)) == ([("a", 4, 0)], [("a", 1, 4)])
    scheduler.add(request("b", 2, 1, family=2))  # arrives during the first step, misses the second
    scheduler.finish_step(first)
    third = schedule(scheduler)
    assert shares(third) == [("a", 1, 5), ("b", 2, 0)]
    scheduler.finish_step(second)
    fourth = schedule(scheduler)
    assert shares(fourth) == [("a", 1, 6)]
    scheduler.finish_step(third)
    # a's last token is on its way and its number is known: no step is wasted on it.
    assert shares(schedule(scheduler)) == []
    assert scheduler.finish_step(fourth) == [a]
    check_scheduler(scheduler)


def test_stop_token_costs_an_extra_async_step() -> None:
    scheduler = engine()
    a = request("a", 4, 1, limit=104)
    scheduler.add(a)
    first, second = schedule(scheduler), schedule(scheduler)
    assert shares(second) == [("a", 1, 4)]
    assert scheduler.finish_step(first) == [a]
    assert scheduler.finish_step(second) == []  # its token is thrown away
    assert a.num_generated == 1
    check_scheduler(scheduler)


def test_token_in_flight_survives_preemption() -> None:
    scheduler = engine(usable=5, max_num_batched_tokens=64)
    a, b = request("a", 8, 8, family=1), request("b", 8, 2, family=2)
    scheduler.add(a)
    scheduler.add(b)
    first = schedule(scheduler)
    second = schedule(scheduler)  # a allocates the fifth block, b none: preempted with its first token in flight
    assert second.preempted == [b]
    assert b.num_generated == 0
    scheduler.finish_step(first)
    assert b.num_generated == 1
    assert b.status == WAITING
    assert list(scheduler.waiting) == [b]
    check_scheduler(scheduler)


def test_abort_frees_immediately() -> None:
    scheduler = engine(max_num_seqs=1)
    running, waiting = request("running", 8, 4), request("waiting", 8, 4)
    scheduler.add(running)
    scheduler.add(waiting)
    step = schedule(scheduler)
    scheduler.abort(waiting)
    scheduler.abort(running)
    scheduler.abort(running)
    assert pool_of(scheduler).num_free == 20
    assert not scheduler.has_work()
    assert scheduler.finish_step(step) == []  # the computed tokens are discarded
    check_scheduler(scheduler)


def test_too_large_requests_are_rejected() -> None:
    scheduler = engine(usable=4, max_model_len=15)
    assert scheduler.accepts(request("a", 10, 5))
    assert not scheduler.accepts(request("b", 10, 6))  # 16 tokens exceed max_model_len
    roomy = engine(usable=4)
    assert roomy.accepts(request("c", 16, 1))  # the last token's KV is never computed
    assert not roomy.accepts(request("d", 16, 2))
    with pytest.raises(ValueError, match="d: 18 tokens do not fit"):
        roomy.add(request("d", 16, 2))
    with pytest.raises(ValueError, match="at least one token"):
        request("f", 0, 1)


def test_impossible_settings_are_rejected() -> None:
    with pytest.raises(InputError, match="num_gpu_blocks: 1 is too small; expected at least 2"):
        EngineConfig(num_gpu_blocks=1)


def test_prompt_with_log_probabilities_is_recomputed_and_cached() -> None:
    scheduler = engine()
    scheduler.add(request("a", 9, 1))
    assert run_step(scheduler) == [("a", 9, 0)]
    scored = request("b", 9, 1, hits=0)
    scheduler.add(scored)
    assert run_step(scheduler) == [("b", 9, 0)]  # vLLM's skip_reading_prefix_cache
    assert scored.cached_tokens == 0
    assert scheduler.stats.requests == 1  # only the lookup of a
    # Rule 7: its full blocks are queued behind the blocks of a.
    assert cached(scheduler) == {(0, 0): 0, (1, 0): 0, (0, 1): 0, (1, 1): 0}
    scheduler.add(request("c", 9, 1))
    assert run_step(scheduler) == [("c", 1, 8)]
