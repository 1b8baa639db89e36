"""Polling of engines: changed engines, dialects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tap.supervisor.service import changed_engine, watch_engines
from tracefile.records.schema import Engine
from wire.url import Origin


class Engines:
    """An upstream with configurable facts."""

    def __init__(self) -> None:
        self.version = "1.0"
        self.metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        self.answers = True
        self.port = 0

    async def script(self, request: Any) -> None:
        if not self.answers:
            raise ConnectionError
        if request.target == b"/version":
            request.write_json({"version": self.version})
        elif request.target == b"/metrics":
            text = self.metrics.encode()
            request.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
        else:
            request.write_json({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})

    @contextlib.asynccontextmanager
    async def serving(self, lab: Any) -> AsyncIterator[Origin]:
        upstream = lab.upstream(self.script)
        async with upstream.serving():
            yield Origin("http", "127.0.0.1", upstream.port)


@pytest.mark.parametrize(
    ("current", "reported", "updated"),
    [
        pytest.param(Engine(version="1"), Engine(version="2"), Engine(version="2"), id="another version"),
        pytest.param(Engine(version="1", block_size=16), Engine(version="1"), None, id="an answer that did not come"),
        pytest.param(
            Engine(version="1", num_gpu_blocks=9, block_size=16),
            Engine(version="1", num_gpu_blocks=8),
            Engine(version="1", num_gpu_blocks=8, block_size=16),
            id="another cache",
        ),
    ],
)
def test_engine_changes(current: Engine | None, reported: Engine | None, updated: Engine | None) -> None:
    assert changed_engine(current, reported) == updated


def test_engine_change_is_reported_once(lab: Any) -> None:
    async def scenario() -> list[Engine]:
        engines, notified = Engines(), []
        dialects: list[str | None] = []
        heard = asyncio.Event()

        def changed(engine: Engine) -> None:
            notified.append(engine)
            heard.set()

        async with engines.serving(lab) as origin:
            known = Engine(name="vllm", version="1.0", block_size=16, num_gpu_blocks=100)
            watching = asyncio.create_task(
                watch_engines(
                    lambda: [origin],
                    known,
                    changed,
                    interval_s=0.01,
                    on_facts=lambda _, facts: dialects.append(facts.dialect),
                )
            )
            await asyncio.sleep(0.2)
            engines.answers = False
            await asyncio.sleep(0.2)
            engines.version, engines.answers = "2.0", True
            await asyncio.wait_for(heard.wait(), 30)
            await asyncio.sleep(0.2)
            watching.cancel()
        assert set(dialects) == {"vllm", None}, "null while it is away"
        return notified

    assert asyncio.run(scenario()) == [Engine(name="vllm", version="2.0", block_size=16, num_gpu_blocks=100)]


def test_first_reachable_engine_gives_the_facts(lab: Any) -> None:
    async def scenario() -> None:
        engines = Engines()
        async with engines.serving(lab) as origin:
            flags = ("--upstream", "http://127.0.0.1:1", "--upstream", str(origin))
            async with lab.command(0, *flags) as tap:
                await tap.post("/v1/completions", {"prompt": [1, 2, 3, 4, 5]})
                await tap.end()
                assert "http://127.0.0.1:1 is unreachable; it gets requests once it is reachable" in tap.errors

    asyncio.run(scenario())
    meta, [record] = lab.read()
    assert (meta.engine.version, record.status) == ("1.0", "ok")
