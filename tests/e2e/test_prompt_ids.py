"""Every API's prompt on a real vLLM: our ids number what it counts, and are the ones that it says itself."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tracefile.files.reading import load_trace
from tracefile.records.schema import Record

pytestmark = pytest.mark.vllm

FUNCTION = {"name": "look_up", "description": "Look <|end|> up.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "the sea"}'}}
MESSAGE = "What of the ships, and what of the 1,234 sailors? " * 12
COMPLETION: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0}
CHAT: dict[str, Any] = {
    **COMPLETION,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "none",
    "messages": [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": [{"type": "text", "text": MESSAGE}, {"type": "text", "text": "Well?"}]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "They sail."},
        {"role": "user", "content": "And then? é 船"},
    ],
}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "max_output_tokens": 5,
    "temperature": 0,
    "instructions": "Be terse.",
    "tools": [{"type": "function", "strict": True, **FUNCTION}],
    "tool_choice": "none",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": MESSAGE}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"what": "the sea"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "They sail."},
        {"role": "user", "content": "And then?"},
    ],
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 5,
    "temperature": 0,
    "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "terse."}],
    "tools": [{"name": "look_up", "description": "Look up.", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "none"},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": MESSAGE}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"what": "the sea"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "They sail."}]},
                {"type": "text", "text": "And then?"},
            ],
        },
    ],
}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION | {"prompt": MESSAGE}),
    ("/v1/completions", COMPLETION | {"prompt": MESSAGE, "add_special_tokens": False, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", RESPONSE | {"stream": True}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages", MESSAGES | {"stream": True}),
]


def recorded(run_tap: Any, engine_url: str, trace: Path, *flags: str) -> list[Record]:
    """The records of all the requests, in their order."""
    flags = ("--block-size", "16", *flags)
    with run_tap(engine_url, trace, *flags) as url, httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        for path, body in REQUESTS:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
    return load_trace(trace)[1]


@pytest.fixture(scope="module")
def engine_url() -> str:
    url = os.environ.get("KVTAPE_VLLM")
    if url is None:
        pytest.skip("KVTAPE_VLLM names no running vLLM; `make test-vllm` starts one")
    return url


def test_prompt_ids_of_every_api_equal_the_engines(engine_url: str, run_tap: Any, tmp_path: Path) -> None:
    model = httpx.get(f"{engine_url}/v1/models", trust_env=False).json()["data"][0]["root"]
    by_engine = recorded(run_tap, engine_url, tmp_path / "engine.jsonl", "--tokenizer", "engine")
    by_files = recorded(run_tap, engine_url, tmp_path / "files.jsonl", "--tokenizer", model)
    injected = recorded(
        run_tap, engine_url, tmp_path / "ids.jsonl", "--tokenizer", "ids", "--inject", "usage,token-ids"
    )
    for (path, body), asked, ours, message in zip(REQUESTS, by_engine, by_files, injected, strict=True):
        where = f"{path} {'streamed' if body.get('stream') else 'whole'}"
        assert (ours.status, ours.endpoint, ours.hash_source) == ("ok", path, "tokenizer"), where
        assert ours.block_hashes, where
        assert asked.block_hashes == ours.block_hashes, where
        assert ours.prompt_tokens_by_tokenizer is None, f"{where}: the counts differ from the engine's"
        assert asked.prompt_tokens_by_tokenizer is None, f"{where}: the counts differ from the engine's"
        if ours.tokens_source == "usage":
            assert (ours.prompt_tokens, ours.cached_tokens) != (None, None), where
            assert ours.prompt_tokens == asked.prompt_tokens, where
        assert (ours.ttft_ms is not None) is bool(body.get("stream")), where
        if path in ("/v1/completions", "/v1/chat/completions") and body.get("stream"):
            assert (message.block_hashes, message.hash_source) == (ours.block_hashes, "engine"), where
            assert message.output_hash_source == "engine", where
    assert json.dumps(REQUESTS[0][1]["prompt"])[1:30] not in (tmp_path / "files.jsonl").read_text()
