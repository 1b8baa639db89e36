"""Policies of routing: known answers for states made by hand, and properties of the hashes."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.routing import POLICIES, PolicySettings, RoutedEngine, RoutedRequest, Router, engine_seed
from engines.routing.affinity import bounded_hash, session_hash
from engines.routing.load import least_loaded, power_of_two, random_choice, round_robin
from engines.routing.prefix import longest_prefix, overlap_against_load

BLOCK_TOKENS = 16


def request(number: int = 0, session: bytes | None = None, blocks: int = 10, prompt_tokens: int = 165) -> RoutedRequest:
    return RoutedRequest(number, 0.0, session, list(range(blocks)), BLOCK_TOKENS, prompt_tokens)


def engine(
    requests: int = 0, overlap: int = 0, *, place: int = 0, prefill_tokens: float = 0.0, held_tokens: float = 0.0
) -> RoutedEngine:
    return RoutedEngine(
        place=place,
        name=str(place),
        seed=engine_seed(str(place)),
        requests=requests,
        overlap=overlap,
        prefill_tokens=prefill_tokens,
        held_tokens=held_tokens,
    )


def idle(count: int) -> list[RoutedEngine]:
    return [engine(place=place) for place in range(count)]


def test_round_robin_goes_round() -> None:
    assert [round_robin(request(number), idle(3)) for number in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_looks_at_requests_then_at_prefill_then_in_turn() -> None:
    assert least_loaded(request(), [engine(3), engine(2, prefill_tokens=900)]) == 1
    assert least_loaded(request(), [engine(2, prefill_tokens=50), engine(2, prefill_tokens=40)]) == 1
    assert [least_loaded(request(number), idle(3)) for number in range(4)] == [0, 1, 2, 0]


def test_random_draws_all_engines_alike_and_the_same_for_a_seed() -> None:
    drawn = [random_choice(7)(request(number), idle(4)) for number in range(2000)]
    assert drawn == [random_choice(7)(request(number), idle(4)) for number in range(2000)]
    assert drawn != [random_choice(8)(request(number), idle(4)) for number in range(2000)]
    assert min(Counter(drawn).values()) > 400


def test_of_two_drawn_engines_the_one_with_fewer_requests_wins() -> None:
    choose = power_of_two(0)
    assert {choose(request(number), [engine(5), engine(4)]) for number in range(50)} == {1}
    # Of three, the busiest is never taken; the other two are, at times.
    taken = Counter(choose(request(number), [engine(9), engine(1), engine(3)]) for number in range(300))
    assert taken.keys() == {1, 2}
    assert taken[1] > taken[2]


def test_a_session_stays_where_it_is_and_mostly_so_with_one_engine_more() -> None:
    names = [b"session %d" % number for number in range(2000)]
    of_four = [session_hash(request(7, name), idle(4)) for name in names]
    of_five = [session_hash(request(9, name), idle(5)) for name in names]
    assert min(Counter(of_four).values()) > 400
    moved = sum(before != after for before, after in zip(of_four, of_five, strict=True))
    assert moved == of_five.count(4)  # nobody moves but to the new one
    # Without a session it is the first block that decides, without any block nothing but the turn.
    assert session_hash(request(1), idle(4)) == session_hash(request(2, blocks=3), idle(4))
    assert [session_hash(request(number, blocks=0), idle(4)) for number in range(3)] == [0, 1, 2]


def test_bounded_hash_leaves_the_sessions_engine_only_when_that_is_full() -> None:
    choose, wanted = bounded_hash(1.25), request(0, b"a")
    home = session_hash(wanted, idle(3))
    assert choose(wanted, idle(3)) == home
    # Five in flight: an engine may hold ⌈1.25 × 6 / 3⌉ = 3.
    full = idle(3)
    full[home].requests, full[(home + 1) % 3].requests = 3, 2
    assert choose(wanted, full) != home
    full[home].requests, full[(home + 1) % 3].requests = 2, 3
    assert choose(wanted, full) == home


@given(st.lists(st.integers(0, 7), max_size=120), st.integers(1, 9), st.sampled_from([1.0, 1.1, 1.25, 2.0]))
def test_no_engine_holds_more_than_its_bound(sessions: list[int], count: int, load_factor: float) -> None:
    router = Router([f"http://engine-{place}" for place in range(count)], bounded_hash(load_factor))
    for number, session in enumerate(sessions):
        sent = request(number, b"%d" % session)
        place = router.choose(sent)
        router.sent(sent, place)
        in_flight = sum(engine.requests for engine in router.engines)
        assert router.engines[place].requests < load_factor * in_flight / count + 1
        if session == 0:
            router.ended(number // 2, 0.0)
    router.check_integrity()


@given(st.lists(st.binary(min_size=1, max_size=8), max_size=60), st.integers(2, 9), st.data())
def test_an_engine_that_leaves_moves_only_its_own_sessions(
    sessions: list[bytes], count: int, data: st.DataObject
) -> None:
    router = Router([f"http://engine-{place}" for place in range(count)], session_hash)
    gone = data.draw(st.integers(0, count - 1))
    before = [router.choose(request(0, session)) for session in sessions]
    router.set_healthy(gone, False)
    after = [router.choose(request(0, session)) for session in sessions]
    assert gone not in after
    assert all(was in (gone, now) for was, now in zip(before, after, strict=True))
    router.set_healthy(gone, True)
    assert [router.choose(request(0, session)) for session in sessions] == before


def test_the_longest_prefix_wins_unless_it_is_short_or_its_engine_overloaded() -> None:
    holder, other = engine(4, 6), engine(0, 2)
    assert longest_prefix(request(), [other, holder, other]) == 1
    # Two of ten blocks are too few to queue for.
    assert longest_prefix(request(), [engine(4, 2), engine()]) == 1
    # Twelve requests against three: whatever it holds.
    assert longest_prefix(request(), [engine(12, 9), engine(3)]) == 1
    assert longest_prefix(request(), [engine(11, 9), engine(3)]) == 0
    # Several hold as much: the one with less to do.
    assert longest_prefix(request(), [engine(5, 6), engine(4, 6)]) == 1


def test_overlap_is_weighed_against_prefill_and_tokens_held() -> None:
    # 165 tokens of prompt: 165 on the first engine, 165 − 6 × 16 = 69 on the second.
    choose = overlap_against_load(1.0)
    assert choose(request(), [engine(held_tokens=95), engine(overlap=6)]) == 1
    assert choose(request(), [engine(), engine(overlap=6, held_tokens=95)]) == 1
    assert choose(request(), [engine(), engine(overlap=6, held_tokens=97)]) == 0
    assert choose(request(), [engine(), engine(overlap=6, prefill_tokens=97)]) == 0
    # Twice the weight bears twice the load.
    assert overlap_against_load(2.0)(request(), [engine(), engine(overlap=6, held_tokens=97)]) == 1
    assert choose(request(), [engine(2), engine(1)]) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_one_engine_gets_all_requests(name: str) -> None:
    assert POLICIES[name].make(PolicySettings())(request(5, b"a"), [engine(9)]) == 0


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10), st.floats(0, 1e6)), min_size=1, max_size=9),
    st.integers(0, 10**9),
    st.sampled_from([None, b"a"]),
)
def test_a_policy_names_an_engine_and_changes_none(
    name: str, states: Sequence[tuple[int, int, float]], number: int, session: bytes | None
) -> None:
    engines = [
        engine(requests, overlap, place=place, prefill_tokens=tokens)
        for place, (requests, overlap, tokens) in enumerate(states)
    ]
    before = msgspec.to_builtins(engines)
    assert 0 <= POLICIES[name].make(PolicySettings())(request(number, session), engines) < len(engines)
    assert msgspec.to_builtins(engines) == before
