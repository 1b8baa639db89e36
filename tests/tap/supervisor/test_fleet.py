"""The supervisor's part in routing: the upstreams' slots, and what a worker's successor finds."""

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


def origin(number: int) -> Origin:
    return Origin("http", f"engine-{number}", 8000)


def slots(fleet: Fleet) -> dict[str, int]:
    return {entry.url: entry.slot for entry in fleet.entries()}


def test_slots_are_stable_and_reused_last() -> None:
    fleet = Fleet((origin(0), origin(1)), 3)
    assert slots(fleet) == {"http://engine-0:8000": 0, "http://engine-1:8000": 1}
    fleet.reload((origin(2), origin(1)))
    assert slots(fleet) == {"http://engine-2:8000": 2, "http://engine-1:8000": 1}
    fleet.reload((origin(0), origin(1)))
    assert slots(fleet) == {"http://engine-0:8000": 0, "http://engine-1:8000": 1}
    fleet.reload((origin(3), origin(1)))
    assert slots(fleet)["http://engine-3:8000"] in (0, 2), "of one that was removed"
    with pytest.raises(InputError, match="4 upstreams; expected at most 3, or a restart of the tap"):
        fleet.reload(tuple(map(origin, range(4))))
    assert len(fleet.origins) == 2, "the refused list changed nothing"


def test_dialect_of_an_upstream_follows_its_last_report() -> None:
    def dialects(fleet: Fleet) -> list[str | None]:
        return [entry.dialect for entry in fleet.entries()]

    fleet = Fleet((origin(0), origin(1)), 2)
    assert dialects(fleet) == [None, None], "not known yet: nothing is added"
    assert [fleet.set_dialect(origin(0), reported) for reported in ("vllm", None, "vllm")] == [True, False, False]
    assert dialects(fleet) == ["vllm", None]
    fleet.set_dialect(origin(1), "trtllm")
    assert dialects(fleet) == ["vllm", None], "TensorRT-LLM refuses fields that it does not know"
    fleet.set_dialect(origin(0), "trtllm")
    assert dialects(fleet) == [None, None]
    named = Fleet((origin(0), origin(1)), 2, "sglang")
    assert not named.set_dialect(origin(0), "vllm")
    assert dialects(named) == ["sglang", "sglang"], "--dialect was given"


def test_prefix_routing_survives_a_killed_worker(lab: Any) -> None:
    prompts = [json.dumps({"prompt": name * 2000, "max_tokens": 1}) for name in "abcdef"]

    async def scenario() -> None:
        async with upstreams_of(lab, answer, answer) as started:
            flags = [flag for item in started for flag in ("--upstream", f"http://127.0.0.1:{item.port}")]

            async def served(prompt: str) -> int:
                before = [len(item.requests) for item in started]
                assert b"200 OK" in await tap.post("/v1/completions", json.loads(prompt))
                [where] = [index for index, item in enumerate(started) if len(item.requests) > before[index]]
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
