"""Ordinary chats of OpenAI's client on real engines: their sessions without names, their sharing, and their replay."""

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import RunTap
from tracefile.files.reading import load_trace
from tracefile.records.schema import Record

TURNS = 4
WORDS = [
    "cache",
    "block",
    "prefix",
    "token",
    "model",
    "server",
    "batch",
    "queue",
    "latency",
    "prompt",
    "engine",
    "page",
]
VARIABLES = {"vllm": "KVTAPE_VLLM", "sglang": "KVTAPE_SGLANG_URL", "llamacpp": "KVTAPE_LLAMACPP"}


@pytest.fixture(
    params=[
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.engines),
        pytest.param("llamacpp", marks=pytest.mark.engines),
    ]
)
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Name and address of an engine."""
    url = os.environ.get(VARIABLES[request.param])
    if url is None:
        pytest.skip(f"{VARIABLES[request.param]} names no running engine")
    return request.param, url


def text(r: random.Random, least: int, most: int) -> str:
    return " ".join(r.choice(WORDS) for _ in range(r.randint(least, most)))


async def chat(client: openai.AsyncOpenAI, model: str, number: int, named: bool) -> None:
    """Streams of one conversation, whose answers are sent back as they came."""
    r = random.Random(number)
    messages: list[Any] = [{"role": "system", "content": text(random.Random(number % 2), 300, 300)}]
    headers = {"X-Session-ID": f"chat {number}"} if named else {}
    await asyncio.sleep(2 * r.random())
    for _ in range(TURNS):
        messages.append({"role": "user", "content": text(r, 20, 120)})
        stream = await client.chat.completions.create(
            model=model, messages=messages, stream=True, max_tokens=r.randint(30, 100), extra_headers=headers
        )
        answer = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        messages.append({"role": "assistant", "content": answer})
        await asyncio.sleep(0.2 + r.random() / 2)


async def chats(url: str, sessions: int, named: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        await asyncio.gather(*(chat(client, model, number, named) for number in range(sessions)))


def cached(records: list[Record]) -> dict[str, int | None]:
    return {record.request_id: record.cached_tokens for record in records}


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def exact_share(engine: str, captured: Path) -> float:
    """Share of the requests whose cached tokens the engine's rules give, too."""
    if engine == "vllm":
        return float(json.loads(run("sim", "audit", str(captured), "--json"))["exact_share"])
    settings = load_trace(captured)[0].engine
    assert settings is not None
    page_size = ("--page-size", str(settings.block_size))
    counts = json.loads(run("sim", "pool", str(captured), "--engine", engine, *page_size, "--json"))
    return float(counts["as_reported"] / counts["compared"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("inject", "named"), [("usage", False), ("auto", False), ("usage", True)])
def test_chats_replay_to_the_token(
    tmp_path: Path, run_tap: RunTap, engine: tuple[str, str], inject: str, named: bool
) -> None:
    name, url = engine
    captured, replayed = tmp_path / "captured.jsonl", tmp_path / "replayed.jsonl"
    sessions = 4 if name == "llamacpp" else 10  # it has four slots
    if name == "llamacpp":
        inject = "auto"  # its timings have the counts
    for path in ("/reset_prefix_cache", "/flush_cache"):
        httpx.post(url + path)  # what the engine has: the capture begins with an empty cache
    with run_tap(url, captured, "--tokenizer", "engine", "--inject", inject) as tapped:
        asyncio.run(chats(tapped, sessions, named))
    _, records = load_trace(captured)
    assert [record.status for record in records] == ["ok"] * sessions * TURNS
    assert sorted(record.turn or 0 for record in records) == sorted([*range(1, TURNS + 1)] * sessions)
    assert len({record.session_id for record in records}) == sessions
    if name == "llamacpp":
        return  # which slot a request gets, and with it what it hits, depends on the moment
    # SGLang's requests are counted in the file's order, which of those in flight at once is not its own for all.
    assert exact_share(name, captured) >= (0.95 if name == "vllm" else 0.8)
    run("replay", str(captured), "--url", url, "--replay-sessions", "--reset-cache", "-o", str(replayed))
    was, now = cached(records), cached(load_trace(replayed)[1])
    assert sum(now.get(name) == tokens for name, tokens in was.items()) >= 0.95 * len(was)
