"""The supervisor's part in routing: health checks, and what a worker's successor finds."""

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from tap.supervisor.upstreams import Fleet
from tests.tap.conftest import answer
from tests.tap.proxy.test_upstreams import upstreams_of
from tests.waiting import until
from tracefile.records.errors import InputError
from wire.url import Origin

CHECK = "/health"


def origin(number: int) -> Origin:
    return Origin("http", f"engine-{number}", 8000)


def slots(fleet: Fleet) -> dict[str, int]:
    return {entry.url: entry.slot for entry in fleet.entries()}


def test_an_upstream_keeps_its_slot_and_a_removed_ones_is_used_last() -> None:
    fleet = Fleet((origin(0), origin(1)), 3)
    assert slots(fleet) == {"http://engine-0:8000": 0, "http://engine-1:8000": 1}
    fleet.reload((origin(2), origin(1)))
    assert slots(fleet) == {"http://engine-2:8000": 2, "http://engine-1:8000": 1}
    fleet.reload((origin(0), origin(1)))
    assert slots(fleet) == {"http://engine-0:8000": 0, "http://engine-1:8000": 1}
    fleet.reload((origin(3), origin(1)))
    assert slots(fleet)["http://engine-3:8000"] in (0, 2), "of one that was removed"
    with pytest.raises(InputError, match="4 upstreams; expected at most 3, or a tap that starts with them"):
        fleet.reload(tuple(map(origin, range(4))))
    assert len(fleet.origins) == 2, "the refused list changed nothing"


def test_an_upstreams_dialect_is_what_it_told_last_and_none_where_no_field_may_be_added() -> None:
    def dialects(fleet: Fleet) -> list[str | None]:
        return [entry.dialect for entry in fleet.entries()]

    fleet = Fleet((origin(0), origin(1)), 2)
    assert dialects(fleet) == [None, None], "not known yet: nothing is added"
    assert [fleet.learn(origin(0), told) for told in ("vllm", None, "vllm")] == [True, False, False]
    assert dialects(fleet) == ["vllm", None]
    fleet.learn(origin(1), "trtllm")
    assert dialects(fleet) == ["vllm", None], "TensorRT-LLM refuses fields that it does not know"
    fleet.learn(origin(0), "trtllm")
    assert dialects(fleet) == [None, None]
    named = Fleet((origin(0), origin(1)), 2, "sglang")
    assert not named.learn(origin(0), "vllm")
    assert dialects(named) == ["sglang", "sglang"], "--dialect was given"


def test_checks_take_an_upstream_out_and_in_after_results_in_a_row() -> None:
    fleet = Fleet((origin(0), origin(1)), 2)
    results = ["HTTP 500", "HTTP 500", None, "HTTP 500", "HTTP 500", "HTTP 503", None, "HTTP 500", None, None]
    said = [fleet.checked(origin(0), result, CHECK) for result in results]
    assert [number for number, line in enumerate(said) if line] == [5, 9]
    assert said[5] == "upstream http://engine-0:8000 gets no requests: /health fails (HTTP 503)"
    assert said[9] == "upstream http://engine-0:8000 is healthy again"
    for _ in range(3):
        fleet.checked(origin(1), "HTTP 500", CHECK)
    assert [(entry.url, entry.healthy) for entry in fleet.entries()][1] == ("http://engine-1:8000", False)
    fleet.reload([origin(1)])
    assert fleet.unhealthy == [origin(1)], "a reload forgets no result"
    assert fleet.checked(origin(0), None, CHECK) is None, "removed while it was asked"


def test_an_unhealthy_upstream_gets_no_requests_until_it_is_well(lab: Any) -> None:
    well = False

    async def sick(request: Any) -> None:
        if request.target == b"/health" and not well:
            request.write_json({}, b"503 Service Unavailable")
        else:
            await answer(request)

    def posts(upstream: Any) -> int:
        return sum(request.head.startswith(b"POST") for request in upstream.requests)

    async def four(tap: Any, upstream: Any) -> int:
        """Send four requests; return the number that came to the upstream."""
        before = posts(upstream)
        for _ in range(4):
            await tap.post("/v1/completions", {"prompt": [1]})
        return posts(upstream) - before

    async def scenario() -> None:
        nonlocal well
        async with upstreams_of(lab, sick, answer) as [bad, good]:
            flags = [flag for one in (bad, good) for flag in ("--upstream", f"http://127.0.0.1:{one.port}")]
            flags += ["--health-check", "/health", "--no-engine-facts"]
            async with lab.command(0, *flags) as tap:
                assert "/health fails (HTTP 503)" in await tap.said("gets no requests")
                while await four(tap, bad):  # the worker hears of it on its own socket
                    pass
                assert not await four(tap, bad)
                before = posts(bad)
                well = True
                await tap.said("is healthy again")
                while posts(bad) == before:
                    await tap.post("/v1/completions", {"prompt": [1]})
                await tap.end()
                assert tap.code == 0, tap.errors

    asyncio.run(scenario())


def test_prompts_find_their_upstream_after_a_worker_was_killed(lab: Any) -> None:
    prompts = [json.dumps({"prompt": name * 2000, "max_tokens": 1}) for name in "abcdef"]

    async def scenario() -> None:
        async with upstreams_of(lab, answer, answer) as started:
            flags = [flag for one in started for flag in ("--upstream", f"http://127.0.0.1:{one.port}")]

            async def served(prompt: str) -> int:
                before = [len(one.requests) for one in started]
                assert b"200 OK" in await tap.post("/v1/completions", json.loads(prompt))
                [where] = [place for place, one in enumerate(started) if len(one.requests) > before[place]]
                return where

            async with lab.command(0, *flags, "--route", "prefix", "--no-engine-facts") as tap:
                where = [await served(prompt) for prompt in prompts]
                assert sorted(where) == [0, 0, 0, 1, 1, 1]
                load = [asyncio.create_task(tap.post("/v1/completions", {"prompt": "x" * 3000})) for _ in range(8)]
                [worker] = tap.pids("tap.proxy.worker")
                os.kill(worker, signal.SIGKILL)
                await asyncio.gather(*load, return_exceptions=True)
                await until(lambda: tap.pids("tap.proxy.worker") not in ([], [worker]))
                assert [await served(prompt) for prompt in reversed(prompts)] == where[::-1]
                await tap.end()
                assert tap.code == 0, tap.errors

    asyncio.run(scenario())
