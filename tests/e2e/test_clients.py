"""The clients that people use work through the tap unchanged, and what they saw is what it recorded.

They run against the embedded engine and, marked vllm, a real one; Responses and Messages against an engine of fixed
answers as well, whose bytes are vLLM's, and tool calls and refusals against that one alone.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import running_tap
from tests.fakes.clientlibraries import client_library
from tracefile.files.reading import load_trace
from tracefile.records.schema import Record

VLLM_MODEL = "tiny"
QUESTION = [{"role": "user", "content": "A seat by the window, please."}]
SEAT = {
    "type": "function",
    "function": {
        "name": "seat",
        "parameters": {"type": "object", "properties": {"row": {"type": "string"}}, "required": ["row"]},
    },
}
TO_THE_LAST_TOKEN = {"ignore_eos": True}


@dataclass
class Tapped:
    """An engine behind a tap. Clients talk to ``url``; records are there once the tap has ended."""

    engine_url: str
    model: str
    url: str
    trace: Path
    running: contextlib.ExitStack
    """Closes clients and then the tap: a socket left open is a warning, and so a failure."""

    @property
    def v1(self) -> str:
        """The base URL as OpenAI's clients want it."""
        return f"{self.url}/v1"

    def openai(self, **settings: Any) -> Any:
        settings = {"base_url": self.v1, "api_key": "sk-canary", "max_retries": 0} | settings
        return self.running.enter_context(client_library("openai").OpenAI(**settings))

    def anthropic(self, **settings: Any) -> Any:
        settings = {"base_url": self.url, "api_key": "sk-canary", "max_retries": 0} | settings
        return self.running.enter_context(client_library("anthropic").Anthropic(**settings))

    def end(self) -> list[Record]:
        """End the tap cleanly and read what it recorded, in order of arrival."""
        self.running.close()
        assert b"canary" not in self.trace.read_bytes()
        return sorted(load_trace(self.trace)[1], key=lambda record: record.arrival_ms or 0.0)


Tap = Callable[..., contextlib.AbstractContextManager[Tapped]]
"""Starts a tap before an engine of this URL and model, with flags of the test's own."""


@pytest.fixture
def tap(tmp_path: Path) -> Tap:
    @contextlib.contextmanager
    def run(engine_url: str, model: str, *flags: str) -> Iterator[Tapped]:
        trace = tmp_path / "captured.jsonl"
        with contextlib.ExitStack() as running:
            url = running.enter_context(running_tap(engine_url, trace, "--tokenizer", "ids", *flags))
            yield Tapped(engine_url, model, url, trace, running)

    return run


def running_vllm() -> str:
    url = os.environ.get("KVTAPE_VLLM")
    if url is None:
        pytest.skip("KVTAPE_VLLM names no running vLLM; `make test-vllm` starts one")
    return url


@pytest.fixture(params=["sim", pytest.param("vllm", marks=pytest.mark.vllm)])
def tapped(request: pytest.FixtureRequest, tap: Tap) -> Iterator[Tapped]:
    """A tap before an engine that generates."""
    real = request.param == "vllm"
    url = running_vllm() if real else str(request.getfixturevalue("sim_server"))
    with tap(url, VLLM_MODEL if real else "kvtape-sim") as running:
        yield running


@pytest.fixture(params=["canned", pytest.param("vllm", marks=pytest.mark.vllm)])
def tapped_api(request: pytest.FixtureRequest, tap: Tap) -> Iterator[Tapped]:
    """A tap before an engine that speaks every API."""
    url = running_vllm() if request.param == "vllm" else request.getfixturevalue("canned_engine").url
    with tap(url, VLLM_MODEL) as running:
        yield running


def counts(record: Record) -> tuple[int | None, int | None]:
    return record.prompt_tokens, record.output_tokens


# OpenAI's client.


def test_openai_chat_stream(tapped: Tapped) -> None:
    stream = tapped.openai().chat.completions.create(
        model=tapped.model,
        messages=QUESTION,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=TO_THE_LAST_TOKEN,
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 8
    [record] = tapped.end()
    assert (record.endpoint, record.status, record.stream) == ("/v1/chat/completions", "ok", True)
    assert counts(record) == (last.usage.prompt_tokens, 8)
    # vLLM may put more than one token into a read, never a token into none.
    assert sum(record.itl_tokens or []) <= 7


@pytest.mark.parametrize("flags", [[], ["--inject", "usage,token-ids"], ["--workers", "2"]], ids=" ".join)
def test_openai_responses_are_equal_through_the_tap(tap: Tap, sim_server: str, flags: list[str]) -> None:
    """The embedded engine answers equal prompts equally, so whatever the tap changed would show."""

    def spoken(client: Any) -> tuple[list[str], dict[str, str]]:
        with client.chat.completions.with_streaming_response.create(
            model="kvtape-sim", messages=QUESTION, max_tokens=12, stream=True
        ) as response:
            events = [re.sub(r'"(id|created)":[^,]*', "", line) for line in response.iter_lines()]
            varying = ("date", "x-request-id")
            return events, {name: text for name, text in response.headers.items() if name not in varying}

    with tap(sim_server, "kvtape-sim", *flags) as tapped:
        assert spoken(tapped.openai()) == spoken(tapped.openai(base_url=f"{sim_server}/v1"))


def test_openai_async_many_at_once(tapped: Tapped) -> None:
    async def ask() -> list[Any]:
        async with client_library("openai").AsyncOpenAI(
            base_url=tapped.v1, api_key="sk-canary", max_retries=0
        ) as client:
            questions = [[{"role": "user", "content": f"Seat {number}?"}] for number in range(16)]
            create = client.chat.completions.create
            return await asyncio.gather(
                *(create(model=tapped.model, messages=question, max_tokens=4) for question in questions)
            )

    answers = asyncio.run(ask())
    records = tapped.end()
    assert sorted(map(counts, records)) == sorted(
        (answer.usage.prompt_tokens, answer.usage.completion_tokens) for answer in answers
    )


def test_openai_disconnect_aborts_the_request(tapped: Tapped) -> None:
    stream = tapped.openai().chat.completions.create(
        model=tapped.model, messages=QUESTION, max_tokens=3000, stream=True, extra_body=TO_THE_LAST_TOKEN
    )
    for _, chunk in zip(range(4), stream, strict=False):
        assert chunk.choices[0].finish_reason is None
    stream.close()
    while running_requests(tapped.engine_url):  # the test's own time limit ends a wait in vain
        pass
    [record] = tapped.end()
    assert (record.status, record.error) == ("client_abort", None)
    assert record.ttft_ms is not None


def running_requests(engine_url: str) -> float:
    """How many requests the engine says it runs."""
    text = httpx.get(f"{engine_url}/metrics", timeout=30).text
    return sum(float(count) for count in re.findall(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE))


def test_openai_raises_its_own_errors(tapped: Tapped) -> None:
    create = tapped.openai().chat.completions.create
    with pytest.raises(client_library("openai").BadRequestError) as bad:
        create(model=tapped.model, messages=QUESTION, max_tokens=-1)
    with pytest.raises(client_library("openai").NotFoundError) as unknown:
        create(model="unheard-of", messages=QUESTION, max_tokens=1)
    direct = tapped.openai(base_url=f"{tapped.engine_url}/v1")
    with pytest.raises(client_library("openai").NotFoundError) as without_tap:
        direct.chat.completions.create(model="unheard-of", messages=QUESTION, max_tokens=1)
    assert "max_tokens" in bad.value.message
    assert (unknown.value.message, unknown.value.body) == (without_tap.value.message, without_tap.value.body)
    records = tapped.end()
    assert [(record.status, record.http_status, record.error) for record in records] == [
        ("error", 400, "http_400"),
        ("error", 404, "http_404"),
    ]


def test_openai_gets_its_tool_call(tap: Tap, canned_engine: Any) -> None:
    """From an engine of fixed answers: a model of random weights calls no tool."""
    with tap(canned_engine.url, "m") as tapped:
        create = tapped.openai().chat.completions.create
        [call] = create(model="m", messages=QUESTION, tools=[SEAT]).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("seat", {"row": "a"})
        chunks = list(create(model="m", messages=QUESTION, tools=[SEAT], stream=True))
        parts = [part.function for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert (parts[0].name, "".join(part.arguments for part in parts)) == ("seat", '{"row": "a"}')
        records = tapped.end()
    assert [(record.tools, record.stream, record.finish_reason) for record in records] == [
        (1, False, "tool_calls"),
        (1, True, "tool_calls"),
    ]


def test_openai_responses(tapped_api: Tapped) -> None:
    responses = tapped_api.openai().responses
    complete = responses.create(model=tapped_api.model, input="A seat by the window, please.", max_output_tokens=5)
    *events, last = responses.create(
        model=tapped_api.model, input="A seat by the aisle, please.", max_output_tokens=5, stream=True
    )
    assert complete.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.type == "response.completed"
    records = tapped_api.end()
    assert [(record.endpoint, record.stream) for record in records] == [
        ("/v1/responses", False),
        ("/v1/responses", True),
    ]
    assert list(map(counts, records)) == [
        (usage.input_tokens, usage.output_tokens) for usage in (complete.usage, last.response.usage)
    ]
    assert records[1].ttft_ms is not None


def test_openai_retries_after_503(tap: Tap, canned_engine: Any) -> None:
    with tap(canned_engine.url, "m") as tapped:
        canned_engine.refusals = 1
        with pytest.raises(client_library("openai").RateLimitError) as refused:
            tapped.openai().chat.completions.create(model="m", messages=QUESTION)
        assert refused.value.response.headers["retry-after"] == "0"
        assert refused.value.response.headers["x-limit"] == "one"
        canned_engine.refusals = 1
        answer = tapped.openai(max_retries=1).chat.completions.create(model="m", messages=QUESTION)
        assert answer.choices[0].message.content == "A seat by the window"
        records = tapped.end()
    assert [record.http_status for record in records] == [429, 429, 200]
    assert records[0].error == "http_429"


# Anthropic's client.


def test_anthropic_stream(tapped_api: Tapped) -> None:
    with tapped_api.anthropic().messages.stream(
        model=tapped_api.model, max_tokens=5, system="Be brief.", messages=QUESTION
    ) as stream:
        text = "".join(stream.text_stream)
        answer = stream.get_final_message()
    assert text == answer.content[0].text
    [record] = tapped_api.end()
    assert (record.endpoint, record.status, record.stream) == ("/v1/messages", "ok", True)
    assert counts(record) == (all_input_tokens(answer.usage), answer.usage.output_tokens)
    assert record.ttft_ms is not None


def all_input_tokens(usage: Any) -> int:
    """A prompt's tokens as Anthropic counts them: new, read from the cache, and written to it, each by itself."""
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return sum(part or 0 for part in parts)


def test_anthropic_raises_its_own_errors(tapped: Tapped) -> None:
    with pytest.raises(client_library("anthropic").NotFoundError):
        tapped.anthropic().messages.create(model="unheard-of", max_tokens=5, messages=QUESTION)
    [record] = tapped.end()
    assert (record.status, record.error) == ("error", "http_404")


# curl.


def curl(*arguments: str) -> str:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    command = [program, "--silent", "--show-error", "--fail-with-body", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def chat_body(model: str, **fields: Any) -> str:
    return json.dumps({"model": model, "messages": QUESTION, "max_tokens": 3, "ignore_eos": True, **fields})


# curl asks for HTTP/2 by an upgrade that the tap, like any HTTP/1.1 proxy, does not take up.
@pytest.mark.parametrize("how", [["--http1.1"], ["--http1.0"], ["--http2"], ["--compressed"]])
def test_curl_asks(tapped: Tapped, how: list[str]) -> None:
    answer = json.loads(curl(*how, f"{tapped.v1}/chat/completions", "--json", chat_body(tapped.model)))
    assert answer["usage"]["completion_tokens"] == 3
    [record] = tapped.end()
    assert counts(record) == (answer["usage"]["prompt_tokens"], 3)


def test_curl_waits_for_100_continue_before_a_large_body(tap: Tap, canned_engine: Any, tmp_path: Path) -> None:
    large = tmp_path / "body.json"
    large.write_text(chat_body("m", padding="x" * 3_000_000))
    with tap(canned_engine.url, "m") as tapped:
        arguments = ["--header", "Expect: 100-continue", "--json", f"@{large}"]
        assert json.loads(curl(*arguments, f"{tapped.v1}/chat/completions"))["usage"]["prompt_tokens"] == 40
        [record] = tapped.end()
    assert record.prompt_tokens == 40
    assert len(canned_engine.seen[-1][1]["padding"]) == 3_000_000
