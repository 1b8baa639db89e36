"""Policies of routing: known answers for states made by hand, and properties of the hashes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.routing import (
    POLICIES,
    RoutedEngine,
    RoutedRequest,
    Router,
    RoutingCosts,
    engine_seed,
)
from engines.routing.costs import at_speed, earliest_first_token, predicted_ttfts_ms
from engines.routing.load import least_loaded, session_hash
from engines.routing.prefix import longest_prefix
from engines.routing.workload import WorkloadAware

BLOCK_TOKENS = 16


def request(number: int = 0, session: bytes | None = None, blocks: int = 10, prompt_tokens: int = 165) -> RoutedRequest:
    return RoutedRequest(number, 0.0, session, list(range(blocks)), BLOCK_TOKENS, prompt_tokens)


def engine(
    requests: int = 0, overlap: int = 0, *, index: int = 0, prefill_tokens: float = 0.0, in_flight_tokens: float = 0.0
) -> RoutedEngine:
    return RoutedEngine(
        index=index,
        name=str(index),
        seed=engine_seed(str(index)),
        requests=requests,
        overlap=overlap,
        prefill_tokens=prefill_tokens,
        in_flight_tokens=in_flight_tokens,
    )


def idle(count: int) -> list[RoutedEngine]:
    return [engine(index=index) for index in range(count)]


def test_least_loaded_ties_go_to_fewest_prefill_tokens_then_round_robin() -> None:
    assert least_loaded(request(), [engine(3), engine(2, prefill_tokens=900)]) == 1
    assert least_loaded(request(), [engine(2, prefill_tokens=50), engine(2, prefill_tokens=40)]) == 1
    assert [least_loaded(request(number), idle(3)) for number in range(4)] == [0, 1, 2, 0]


def test_session_hash_is_sticky_and_mostly_so_after_adding_an_engine() -> None:
    names = [b"session %d" % number for number in range(2000)]
    of_four = [session_hash(request(7, name), idle(4)) for name in names]
    of_five = [session_hash(request(9, name), idle(5)) for name in names]
    assert min(Counter(of_four).values()) > 400
    moved = sum(before != after for before, after in zip(of_four, of_five, strict=True))
    assert moved == of_five.count(4)  # sessions move only to the new engine
    # Without a session it is the first block that decides, without any block nothing but the turn.
    assert session_hash(request(1), idle(4)) == session_hash(request(2, blocks=3), idle(4))
    assert [session_hash(request(number, blocks=0), idle(4)) for number in range(3)] == [0, 1, 2]


@given(st.lists(st.binary(min_size=1, max_size=8), max_size=60), st.integers(2, 9), st.data())
def test_removing_an_engine_moves_only_its_sessions(sessions: list[bytes], count: int, data: st.DataObject) -> None:
    router = Router([f"http://engine-{index}" for index in range(count)], session_hash)
    gone = data.draw(st.integers(0, count - 1))
    before = [router.choose(request(0, session)) for session in sessions]
    router.set_healthy(gone, False)
    after = [router.choose(request(0, session)) for session in sessions]
    assert gone not in after
    assert all(was in (gone, now) for was, now in zip(before, after, strict=True))
    router.set_healthy(gone, True)
    assert [router.choose(request(0, session)) for session in sessions] == before


def test_longest_prefix_wins_unless_short_or_engine_overloaded() -> None:
    holder, second = engine(4, 6), engine(0, 2)
    assert longest_prefix(request(), [second, holder, second]) == 1
    # Two of ten blocks are too few to queue for.
    assert longest_prefix(request(), [engine(4, 2), engine()]) == 1
    # Twelve requests against three: whatever it holds.
    assert longest_prefix(request(), [engine(12, 9), engine(3)]) == 1
    assert longest_prefix(request(), [engine(11, 9), engine(3)]) == 0
    # Equal prefix hits: the least loaded engine.
    assert longest_prefix(request(), [engine(5, 6), engine(4, 6)]) == 1


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10), st.floats(0, 1e6)), min_size=1, max_size=9),
    st.integers(0, 10**9),
    st.sampled_from([None, b"a"]),
)
def test_policies_return_an_index_and_do_not_mutate_engines(
    name: str, states: Sequence[tuple[int, int, float]], number: int, session: bytes | None
) -> None:
    engines = [
        engine(requests, overlap, index=index, prefill_tokens=tokens)
        for index, (requests, overlap, tokens) in enumerate(states)
    ]
    before = list(map(asdict, engines))
    assert 0 <= POLICIES[name].make()(request(number, session), engines) < len(engines)
    assert list(map(asdict, engines)) == before


COSTS = RoutingCosts(
    t0_ms=5.0, per_prefill_token_ms=0.1, per_attention_token2_ms=1e-4, per_decode_ms=1.0, frontend_base_ms=2.0
)


def test_predicted_ttft_is_api_server_time_plus_prefill_steps() -> None:
    wanted = request(prompt_tokens=200)
    # 2 + 200 × 0.1 + 200² / 2 × 1e-4 + one step of 5.
    assert predicted_ttfts_ms(wanted, [with_costs(engine())]) == [pytest.approx(2 + 20 + 2 + 5)]
    # Of 200 tokens 160 are cached: 40 × 0.1 + (40 × 160 + 40² / 2) × 1e-4.
    assert predicted_ttfts_ms(wanted, [with_costs(engine(overlap=10))]) == [pytest.approx(2 + 4 + 0.72 + 5)]
    # 300 tokens outstanding of two prompts of 400: attention of 200 tokens of depth; two decodes in each of two steps.
    busy = with_costs(engine(2, prefill_tokens=300, in_flight_tokens=800), step_tokens=400)
    assert predicted_ttfts_ms(wanted, [busy]) == [pytest.approx(2 + 22 + 30 + 300 * 200 * 1e-4 + 2 * (5 + 2))]
    fast = replace(engine(), costs=at_speed(COSTS, 2.0))
    assert predicted_ttfts_ms(wanted, [fast]) == [pytest.approx(29 / 2)]


def with_costs(engine: RoutedEngine, step_tokens: float = 8192) -> RoutedEngine:
    return replace(engine, costs=COSTS._replace(step_tokens=step_tokens))


def assert_books_add_up(policy: WorkloadAware) -> None:
    for index, residents in policy._residents.items():
        living = [session for session in policy._sessions.values() if session.index == index]
        assert abs(residents.sessions - sum(session.weight for session in living)) < 1e-6
        assert abs(residents.session_tokens - sum(session.weight * session.session_tokens for session in living)) < 1e-3
    resting = {name for name, session in policy._sessions.items() if not session.in_flight}
    assert resting <= {name for _, name in policy._thinking}


def test_workload_aware_avoids_an_idle_engine_with_many_active_sessions() -> None:
    policy = WorkloadAware()
    router = Router(["a", "b"], policy)
    # Ten sessions of two turns, growing by 1,000 tokens, all on engine 0, each request 1 s, each rest 1 s.
    for turn in (1, 2):
        for session in range(10):
            number, at_s = turn * 100 + session, turn * 2.0 + session * 0.01
            router.sent(RoutedRequest(number, at_s, b"%d" % session, [], 16, 1000 * turn), 0)
            router.first_token(number)
            router.ended(number, at_s + 1.0)
            assert_books_add_up(policy)
    assert [engine.requests for engine in router.engines] == [0, 0]
    # Both are idle now. Whether or not there is a session, the next in turn is 0; ten sessions come back there.
    lone = RoutedRequest(200, 5.2, None, [], 16, 1000)
    assert earliest_first_token(lone, router.engines) == 0
    assert router.choose(lone) == 0
    assert router.choose(RoutedRequest(200, 5.2, b"new", [], 16, 1000)) == 1
    # After four mean rests they count as ended, and as sessions of two turns.
    assert router.choose(RoutedRequest(200, 500.0, b"new", [], 16, 1000)) == 0
    assert_books_add_up(policy)
    assert policy.statistics.continuation_probability(1) > 0.8
    assert policy.statistics.continuation_probability(2) < 0.3


def test_workload_aware_counts_prefill_of_evicted_contexts() -> None:
    router = Router(["a", "b"], WorkloadAware(), capacity_blocks=100)
    router.sent(RoutedRequest(0, 0.0, b"s", [], 16, 800), 0)
    router.ended(0, 1.0)
    # 800 of the 1,600 tokens of engine 0 will be needed, so half of 160 new tokens; by load alone engine 0 is next.
    wanted = RoutedRequest(2, 1.0, b"t", [], 16, 160)
    assert earliest_first_token(wanted, router.engines) == 0
    assert router.choose(wanted) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.floats(0, 40), st.booleans(), st.integers(0, 3000)),
        max_size=60,
    )
)
def test_workload_aware_resident_counts_are_consistent(steps: list[tuple[int, int, float, bool, int]]) -> None:
    policy = WorkloadAware()
    router = Router(["a", "b", "c"], policy)
    now_s = 0.0
    for number, (session, ended, pause_s, sessionless, tokens) in enumerate(steps):
        now_s += pause_s
        sent = RoutedRequest(number, now_s, None if sessionless else b"%d" % session, [], 16, tokens)
        router.sent(sent, router.choose(sent))
        for earlier in range(ended):
            router.ended(number - 2 * earlier, now_s)
        assert_books_add_up(policy)
        router.check_integrity()
