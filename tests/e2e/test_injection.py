"""Injected answers are the engine's plain ones, byte for byte: straight from it, and through a tap that injects.

Ids and times of creation aside, which differ between any two answers, and vLLM's fingerprint, which it moves to the
usage event. Where one event holds two tokens of a busy engine and another run's holds one, texts are joined first.
"""

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tracefile.files.reading import load_trace
from tracefile.records.schema import Record

LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
TEXT: dict[str, Any] = {"prompt": "One line of a prompt. " * 20, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT = {name: TEXT[name] for name in ("max_tokens", "temperature", "ignore_eos")} | {
    "messages": [{"role": "user", "content": "One question. " * 20}]
}
SAMPLED = {"n": 2, "temperature": 1, "seed": 7}
REQUESTS = {
    "text": ("/v1/completions", TEXT),
    "text, ids as prompt": ("/v1/completions", TEXT | {"prompt": list(range(100, 200))}),
    "text, batch": ("/v1/completions", TEXT | {"prompt": ["a b c", "d e"]}),
    "text, n = 2": ("/v1/completions", TEXT | SAMPLED),
    "text, logprobs": ("/v1/completions", TEXT | {"logprobs": 1}),
    "text, echo": ("/v1/completions", TEXT | {"echo": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, n = 2": ("/v1/chat/completions", CHAT | SAMPLED),
    "chat, logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    "chat, named tool": (
        "/v1/chat/completions",
        CHAT | {"tools": [LOOK_UP], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    ),
    "chat, refused": ("/v1/chat/completions", CHAT | {"max_tokens": -1}),
    "chat, no messages": ("/v1/chat/completions", {"max_tokens": 1}),
}
VLLM_ONLY = {"text, logprobs", "text, echo", "chat, logprobs", "chat, named tool"}
"""What the embedded engine does not speak."""


@pytest.fixture(params=["sim", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An engine's address and its model."""
    if request.param == "sim":
        return str(request.getfixturevalue("sim_server")), "kvtape-sim"
    url = os.environ.get("KVTAPE_VLLM")
    if url is None:
        pytest.skip("KVTAPE_VLLM names no running vLLM; `make test-vllm` starts one")
    return url, "tiny"


def timeless(body: bytes) -> bytes:
    """A body without what differs between any two answers."""
    body = re.sub(rb'"(id|request_id)":"(?:chat)?cmpl[^"]*"', rb'"\1":""', body)
    return re.sub(rb'"created":\d+', b'"created":0', body)


def shapes(stream: bytes) -> dict[int | str, tuple[list[bytes], str]]:
    """For each choice its events as they are written but for their text, repetitions once; and its whole text."""
    result: dict[int | str, tuple[list[bytes], str]] = {}
    for event in timeless(stream).split(b"\n\n"):
        index: int | str = "other"
        text = ""
        if event.startswith(b'data: {"id"'):
            [choice] = json.loads(event[6:])["choices"] or [{"index": "usage", "text": ""}]
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or json.dumps(choice["delta"])
        blank = re.sub(rb'"(text|content|arguments)":"(?:[^"\\]|\\.)*"', rb'"\1":""', event)
        blank = re.sub(rb'"logprobs":\{.*\},"finish_reason"', b'"logprobs":{},"finish_reason"', blank)
        events, texts = result.get(index, ([], ""))
        result[index] = ([*events, blank], texts + text)
    return {
        index: ([event for event, _ in itertools.groupby(events)], text) for index, (events, text) in result.items()
    }


def without_moved(stream: bytes) -> bytes:
    """A plain stream without what vLLM moves to the usage event."""
    return re.sub(rb',"system_fingerprint":"[^"]*"\}\n', b"}\n", stream)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [True, False])
def test_injected_responses_are_unchanged_for_clients(
    tmp_path: Path, run_tap: Any, engine: tuple[str, str], stream: bool
) -> None:
    url, model = engine
    requests = {name: request for name, request in REQUESTS.items() if model == "tiny" or name not in VLLM_ONLY}
    trace = tmp_path / "captured.jsonl"
    flags = ("--tokenizer", "ids", "--inject", "usage,token-ids")
    with run_tap(url, trace, *flags) as tapped, httpx.Client(timeout=120) as client:
        for name, (path, fields) in requests.items():
            body = fields | {"model": model, "stream": stream}
            client.post(url + path, json=body)  # fills the cache: both find the same in it, whichever test is the first
            plain, injected = (client.post(base + path, json=body) for base in (url, tapped))
            assert injected.status_code == plain.status_code, name
            assert injected.headers["content-type"] == plain.headers["content-type"], name
            if "event-stream" in plain.headers["content-type"]:
                assert shapes(injected.content) == shapes(without_moved(plain.content)), name
            else:
                assert timeless(injected.content) == timeless(plain.content), name
                assert len(injected.content) == int(injected.headers["content-length"])
    records = dict(zip(requests, in_order(trace), strict=True))
    for name, record in records.items():
        assert record.injected == expected_additions(name, stream=stream), name
        if record.status == "ok" and "token-ids" in (record.injected or []) and "batch" not in name:
            assert (record.tokens_source, record.hash_source) == ("usage", "engine"), name
    single = records["chat"]
    if not stream:
        return
    assert single.prompt_tokens is not None
    assert len(single.block_hashes or []) == single.prompt_tokens // 16
    assert single.output_hash_source == "engine"


def in_order(trace: Path) -> list[Record]:
    return sorted(load_trace(trace)[1], key=lambda record: record.arrival_ms or 0.0)


def expected_additions(name: str, *, stream: bool) -> list[str] | None:
    if name == "chat, no messages" or not stream:
        return None
    return ["usage"] if "echo" in name else ["token-ids", "usage"]
