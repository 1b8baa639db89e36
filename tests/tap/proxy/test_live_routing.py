"""A policy on live traffic: prompts known by their first bytes, failures of upstreams and of the policy."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.routing import POLICIES, RoutedEngine, RoutedRequest, Router
from engines.routing.prefix import PrefixIndex
from tap.ipc.sharedmemory import BoardSize, UpstreamBoard
from tap.proxy.routing import LivePolicy, live_policy
from tap.proxy.upstreams import Upstream, Upstreams
from tests.tap.proxy.test_upstreams import answer, entry, head, origins_of, upstreams_of
from tracefile.hashing.hashkey import HashKey, keyed_id
from wire.head import RequestHead, parse_request_head

KEY = HashKey(b"k" * 32)


def prompt(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}).encode()


def served(upstreams: Sequence[Any]) -> list[int]:
    return [len(item.requests) for item in upstreams]


def idle(tap: Any) -> bool:
    board = tap.relays.upstreams.board
    return all(board.totals(item.slot) == [0, 0, 0] for item in tap.relays.upstreams.all)


@pytest.mark.parametrize("policy", ["prefix", "cost"])
def test_shared_prefixes_go_to_the_same_upstream_unchanged(lab: Any, policy: str) -> None:
    bodies = [prompt(name * 3000 + f" turn {turn}") for name in "abc" for turn in range(3)]

    async def scenario() -> None:
        async with (
            upstreams_of(lab, answer, answer) as started,
            lab.tap(answer, upstreams=origins_of(*started), route=policy) as (tap, _),
        ):
            for body in bodies:
                assert (await tap.post("/v1/chat/completions", body)).status == 200
            for item in started:
                names = Counter(request.body[60:61] for request in item.requests)
                assert set(names.values()) == {3}, "a prompt's turns stay together"
            assert sorted(request.body for item in started for request in item.requests) == sorted(bodies)
            assert idle(tap)
            assert sum(item.hit_blocks for item in tap.relays.upstreams.all) > 0

    asyncio.run(scenario())
    assert len(lab.records) == len(bodies)
    assert all(record.upstream for record in lab.records)


async def slow_post(tap: Any, start: bytes, remainder: bytes, upstreams: Sequence[Any], framing: bytes) -> bytes:
    """Send a part of the request, wait until an upstream has its head, then send the rest."""
    reader, writer = await tap.connect()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n" + framing + b"\r\n" + start)
    async with asyncio.timeout(30):
        while not any(item.connections for item in upstreams):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    writer.write(remainder)
    raw: bytes = await reader.read()
    writer.close()
    return raw


def test_slow_upload_is_routed_by_the_bytes_received(lab: Any) -> None:
    body = prompt("s" * 9000)

    async def scenario() -> None:
        async with (
            upstreams_of(lab, answer, answer) as started,
            lab.tap(answer, upstreams=origins_of(*started), route="prefix") as (tap, _),
        ):
            length = b"Content-Length: %d\r\n" % len(body)
            raw = await slow_post(tap, body[:2000], body[2000:], started, length)
            assert raw.startswith(b"HTTP/1.1 200")
            [request] = [request for item in started for request in item.requests]
            assert request.body == body
            assert sum(item.prompt_blocks for item in tap.relays.upstreams.all) == 3, (
                "pieces of 512 bytes of the first 2000"
            )
            assert idle(tap)

    asyncio.run(scenario())


def test_client_that_disconnects_before_routing_sends_nothing(lab: Any) -> None:
    async def scenario() -> None:
        async with (
            upstreams_of(lab, answer, answer) as started,
            lab.tap(answer, upstreams=origins_of(*started), route="prefix") as (tap, _),
        ):
            _, writer = await tap.connect()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9000\r\n\r\nab")
            await writer.drain()
            writer.transport.abort()
            assert (await tap.post("/v1/chat/completions", prompt("next"))).status == 200
            assert sum(served(started)) == 1
            assert idle(tap)

    asyncio.run(scenario())
    assert sorted(record.status for record in lab.records) == ["client_abort", "ok"]


def end_wait(upstreams: Upstreams, index: int) -> None:
    """As if the time of an ejection had passed."""
    upstreams.all[index].ejection.until_s = 1e-6


def test_upstream_with_consecutive_errors_is_ejected_and_retried(lab: Any) -> None:
    fails = True

    async def sick(request: Any) -> None:
        if fails:
            request.write_json({"error": {}}, b"503 Service Unavailable")
        else:
            await answer(request)

    async def scenario() -> None:
        nonlocal fails
        async with (
            upstreams_of(lab, sick, answer) as [bad, good],
            lab.tap(answer, upstreams=origins_of(bad, good)) as (tap, _),
        ):
            for _ in range(16):
                await tap.post("/v1/completions", {"prompt": [1]})
            assert served([bad, good]) == [5, 11]
            [ejected, _] = tap.relays.upstreams.all
            assert ejected.ejection.count == 1
            end_wait(tap.relays.upstreams, 0)
            await tap.post("/v1/completions", {"prompt": [1]})
            await tap.post("/v1/completions", {"prompt": [1]})
            assert (len(bad.requests), ejected.ejection.count) == (6, 2), "one trial, which failed"
            fails = False
            end_wait(tap.relays.upstreams, 0)
            for _ in range(4):
                assert (await tap.post("/v1/completions", {"prompt": [1]})).status == 200
            assert len(bad.requests) > 7, "back among the others"

    asyncio.run(scenario())


def picked(upstreams: Upstreams, session: str | None, keys: Sequence[int] = ()) -> str:
    assignment = upstreams.pick(head(session), keys)
    assignment.begin()
    assignment.end()
    return assignment.upstream.name


def test_load_is_summed_over_live_workers() -> None:
    board = UpstreamBoard(size=BoardSize(workers=2))
    mine, second = (
        Upstreams([entry(0), entry(1)], live_policy("least-loaded"), board=board, worker=worker) for worker in (0, 1)
    )
    cached_keys = [second.pick(head()) for _ in range(3)]
    for assignment in cached_keys:
        assignment.upstream = second.all[0]
        assignment.begin()
    assert [picked(mine, None) for _ in range(4)] == ["http://engine-1:8000"] * 4
    board.forget_worker(1)
    assert len({picked(mine, None) for _ in range(4)}) == 2


def test_prefix_table_is_shared_by_workers_and_survives_a_crash() -> None:
    board = UpstreamBoard(size=BoardSize(workers=2))
    entries = [entry(0), entry(1), entry(2)]
    keys = [[number * 10 + index + 1 for index in range(4)] for number in range(6)]
    first = Upstreams(entries, live_policy("prefix"), board=board)
    where = [picked(first, None, sample) for sample in keys]
    for worker in (0, 1):
        another = Upstreams(entries, live_policy("prefix"), board=board, worker=worker)
        assert [picked(another, None, sample) for sample in reversed(keys)] == where[::-1]


@settings(max_examples=15)
@given(st.randoms(use_true_random=False))
@pytest.mark.parametrize("policy", ["prefix", "cost"])
def test_prefix_evictions_move_no_session(policy: str, random: Any) -> None:
    """Twelve prefixes of more bytes than are read, more keys than a table of 256 cells keeps."""
    board = UpstreamBoard(size=BoardSize(slots=2, keys=256))
    upstreams = Upstreams([entry(0), entry(1)], live_policy(policy), board=board)
    prefixes = [[random.getrandbits(64) for _ in range(31)] for _ in range(12)]
    homes: dict[str, Upstream] = {}
    for _ in range(60):
        number = random.randrange(20)
        session, keys = f"s{number}", prefixes[number % 12]
        lines = f"X-Session-ID: {session}\r\nContent-Length: 40000\r\n"
        requested = parse_request_head(f"POST / HTTP/1.1\r\nHost: t\r\n{lines}\r\n".encode())
        home = homes.get(session)
        current = home is not None and 8 * home.prefix_table.overlap(keys) >= 7 * len(keys)
        assignment = upstreams.pick(requested, keys)
        assert not current or assignment.upstream is home
        homes[session] = assignment.upstream
        assignment.begin()
        assignment.end()


def test_sessions_with_a_long_shared_prefix_are_sticky() -> None:
    """Conversations with a shared system prompt of 40 KB: equal prefix keys, cached on both upstreams."""
    keys = list(range(1, 33))

    def requested(session: str) -> RequestHead:
        lines = f"X-Session-ID: {session}\r\nContent-Length: 40000\r\n"
        return parse_request_head(f"POST /v1/completions HTTP/1.1\r\nHost: t\r\n{lines}\r\n".encode())

    for policy in ("prefix", "cost", "workload"):
        upstreams = Upstreams([entry(0), entry(1)], live_policy(policy))
        first, second = upstreams.all
        for item in upstreams.all:
            item.prefix_table.add(keys)
        sent = []
        for number in range(2):  # at once, so that they part
            sent.append(upstreams.pick(requested(f"s{number}"), keys))
            sent[-1].begin()
        assert {assignment.upstream for assignment in sent} == {first, second}, policy
        for assignment in sent:
            assignment.end()
        for _ in range(3):
            for number, before in enumerate(sent):
                again = upstreams.pick(requested(f"s{number}"), keys)
                again.begin()
                again.end()
                assert again.upstream is before.upstream, policy
        assert sum(item.hit_blocks for item in upstreams.all) <= sum(item.prompt_blocks for item in upstreams.all)
        gone = sent[0].upstream
        left = upstreams.pick(requested("s0"), keys, [gone])
        left.begin()
        left.end()
        assert upstreams.pick(requested("s0"), keys).upstream is left.upstream is not gone, "its home has moved"


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 6)), max_size=40), st.integers(2, 4))
@pytest.mark.parametrize("policy", ["session", "prefix", "round-robin"])
def test_live_and_simulated_routing_agree(policy: str, requests: list[tuple[int, bool, int]], count: int) -> None:
    """Session and prefix decide the same way in the tap and in the fleet simulated from its trace, by records' ids."""
    entries = [entry(index) for index in range(count)]
    live = Upstreams(entries, live_policy(policy), key=KEY)
    knowledge = PrefixIndex(count, capacity_blocks=1 << 10) if POLICIES[policy].uses_cache else None
    simulated = Router([item.url for item in entries], POLICIES[policy].make(), knowledge=knowledge)
    for number, (session, reported, length) in enumerate(requests):
        keys = [session * 100 + index + 1 for index in range(length)] if knowledge is not None else []
        name = f"session {session}" if reported else None
        recorded = None if name is None else keyed_id(KEY, "session", name)
        request = RoutedRequest(
            number=number,
            arrival_s=float(number),
            session=None if recorded is None else recorded.encode(),
            blocks=keys,
            block_tokens=128.0,
            prompt_tokens=0,
        )
        index = simulated.choose(request)
        simulated.sent(request, index)
        simulated.ended(number, float(number))
        assert picked(live, name, keys) == entries[index].url


def raises(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
    raise KeyError(request.session)


def test_policy_exception_falls_back_to_least_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    policy = LivePolicy(raises, reads_prompt=False, keeps_sessions=True)
    upstreams = Upstreams([entry(0), entry(1)], policy)
    assert len({picked(upstreams, "secret") for _ in range(3)}) == 2, "served by the least loaded"
    assert dict(policy.failures) == {"KeyError": 3}
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tap: --route: KeyError at test_live_routing.py:")
    assert "secret" not in line
