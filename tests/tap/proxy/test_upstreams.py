"""Several upstreams: routing, unreachable upstreams, reload."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.routing import RoutedRequest
from engines.routing.load import session_hash
from tap.ipc.messages import UpstreamEntry
from tap.proxy.routing import live_policy
from tap.proxy.upstreams import Upstream, Upstreams
from wire.head import RequestHead, parse_request_head
from wire.url import Origin

COMPLETION = {"model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 4}
SESSION_HEADERS = ("X-Session-ID", "X-Dynamo-Session-ID")


async def answer(request: Any) -> None:
    request.write_json({"choices": [{"index": 0, "text": "t", "finish_reason": "length"}]})


@contextlib.asynccontextmanager
async def upstreams_of(lab: Any, *scripts: Any) -> AsyncIterator[list[Any]]:
    async with contextlib.AsyncExitStack() as stack:
        started = [lab.upstream(script) for script in scripts]
        for item in started:
            await stack.enter_async_context(item.serving())
        yield started


def origins_of(*upstreams: Any) -> tuple[Origin, ...]:
    return tuple(Origin("http", "127.0.0.1", item if isinstance(item, int) else item.port) for item in upstreams)


def entry(number: int, **state: Any) -> UpstreamEntry:
    return UpstreamEntry(f"http://engine-{number}:8000", number, **state)


def entries_of(*upstreams: Any) -> list[UpstreamEntry]:
    """Slots by port, as assigned by the supervisor."""
    return [UpstreamEntry(str(origin), origin.port % 16) for origin in origins_of(*upstreams)]


def head(session: str | None = None, header: str = "X-Session-ID") -> RequestHead:
    line = "" if session is None else f"{header}: {session}\r\n"
    return parse_request_head(f"POST /v1/completions HTTP/1.1\r\nHost: t\r\n{line}\r\n".encode())


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_round_robin_and_upstream_in_records(lab: Any) -> None:
    async def scenario() -> list[str]:
        async with (
            upstreams_of(lab, answer, answer, answer) as started,
            lab.tap(answer, upstreams=origins_of(*started)) as (tap, _),
        ):
            for _ in range(6):
                assert (await tap.post("/v1/completions", COMPLETION)).status == 200
            assert [len(item.requests) for item in started] == [2, 2, 2]
            return [str(item) for item in origins_of(*started)]

    names = asyncio.run(scenario())
    assert sorted(record.upstream for record in lab.records) == sorted(names * 2)


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_sessions_are_sticky(header: str) -> None:
    upstreams = Upstreams([entry(0), entry(1)], live_policy("session"))
    for session in "abcd":
        assert len({upstreams.pick(head(session, header)).upstream.name for _ in range(3)}) == 1


def preferred(upstreams: list[Upstream], session: bytes) -> Upstream:
    request = RoutedRequest(0, 0.0, session, (), 1.0, 0)
    return upstreams[session_hash(request, [upstream.engine for upstream in upstreams])]


@given(st.integers(2, 6), st.data())
def test_removing_an_upstream_moves_only_its_sessions(count: int, data: st.DataObject) -> None:
    everyone = [Upstream(entry(number)) for number in range(count)]
    gone = data.draw(st.sampled_from(everyone))
    remainder = [item for item in everyone if item is not gone]
    for session in data.draw(st.lists(st.binary(max_size=20), max_size=30)):
        favourite, moved_to = preferred(everyone, session), preferred(remainder, session)
        assert moved_to is favourite or favourite is gone


def test_workers_agree_on_sessions_but_start_round_robin_differently() -> None:
    entries = [entry(number) for number in range(3)]
    workers = [Upstreams(entries, live_policy("session"), worker=number) for number in range(3)]
    assert len({worker.pick(head("s")).upstream.name for worker in workers}) == 1
    assert len({worker.pick(head()).upstream.name for worker in workers}) == 3


def test_unreachable_upstream_is_skipped(lab: Any, closed_port: int) -> None:
    async def scenario() -> None:
        async with (
            upstreams_of(lab, answer) as [up],
            lab.tap(answer, upstreams=origins_of(closed_port, up)) as (tap, _),
        ):
            for _ in range(6):
                assert (await tap.post("/v1/completions", COMPLETION)).status == 200
            assert len(up.requests) == 6
            down = tap.relays.upstreams
            assert {item.upstream.name for item in (down.pick(head()), down.pick(head()))} == {str(*origins_of(up))}

    asyncio.run(scenario())
    assert len({record.upstream for record in lab.records}) == 1


def test_removed_upstream_finishes_its_requests(lab: Any) -> None:
    begun, finish = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> None:
        begun.set()
        await finish.wait()
        await answer(request)

    async def scenario() -> None:
        async with (
            upstreams_of(lab, slow, answer) as [old, new],
            lab.tap(answer, upstreams=origins_of(old)) as (tap, _),
        ):
            in_flight = asyncio.create_task(tap.post("/v1/completions", COMPLETION))
            await begun.wait()
            tap.relays.upstreams.reload(entries_of(new))
            assert (await tap.post("/v1/completions", COMPLETION)).status == 200
            assert len(new.requests) == 1
            old.gone.clear()
            finish.set()
            assert (await in_flight).status == 200
            await asyncio.wait_for(old.gone.wait(), 30)
            assert len(old.requests) == 1

    asyncio.run(scenario())


def test_sighup_reloads_upstreams_and_ignores_an_invalid_file(lab: Any) -> None:
    async def scenario() -> None:
        async with upstreams_of(lab, answer, answer) as [first, second]:
            file = lab.folder / "upstreams"
            file.write_text(f"# engines\nhttp://127.0.0.1:{first.port}  # the first\n\n")
            flags = ("--upstreams", str(file), "--workers", "2", "--no-engine-facts")
            async with lab.command(0, *flags) as tap:
                await tap.post("/v1/completions", COMPLETION)
                assert (len(first.requests), len(second.requests)) == (1, 0)

                file.write_text(f"http://127.0.0.1:{second.port}\nnonsense\n")
                tap.process.send_signal(signal.SIGHUP)
                assert "nonsense" in await tap.printed("UPSTREAMS DO NOT CHANGE")
                for _ in range(4):
                    await tap.post("/v1/completions", COMPLETION)
                assert (len(first.requests), len(second.requests)) == (5, 0)

                file.write_text(f"http://127.0.0.1:{second.port}\n")
                tap.process.send_signal(signal.SIGHUP)
                await tap.printed("upstreams are now")
                while not second.requests:  # each worker gets the reload on a separate socket
                    await tap.post("/v1/completions", COMPLETION)
                await tap.end()
                assert tap.code == 0, tap.errors

    asyncio.run(scenario())
    assert lab.summary["dropped"] == {}
