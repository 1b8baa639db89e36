"""``sim serve`` over real sockets: shapes, cached tokens to the token, aborts, and how it starts and ends."""

import contextlib
import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sim.__main__ import main
from tests.conftest import engine_model
from tracefile.records.errors import InputError

Body = dict[str, Any]
StartSimServer = Callable[..., contextlib.AbstractContextManager[str]]
BLOCK = 16


@pytest.fixture(scope="module")
def engine(start_sim_server: StartSimServer) -> Iterator[httpx.Client]:
    """An engine that does not sleep, so that nothing here waits for it."""
    flags = ("--speed", "max", "--block-size", str(BLOCK), "--num-gpu-blocks", "2048", "--max-model-len", "8192")
    with start_sim_server(*flags) as url, httpx.Client(base_url=url, timeout=30.0) as client:
        yield client


@pytest.fixture(autouse=True)
def _empty_cache(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        client: httpx.Client = request.getfixturevalue("engine")
        assert client.post("/reset_prefix_cache").json() == {"success": True}


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> Body:
    """An unstreamed completion that fills its max_tokens."""
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    reply: Body = response.json()
    return reply


def cached(response: Body) -> int:
    count: int = response["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def streamed(client: httpx.Client, path: str, **body: Any) -> list[Body]:
    """The events of a stream, ``[DONE]`` checked and left out."""
    with client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_stream_equals_the_non_streamed_response(engine: httpx.Client) -> None:
    """Longer than a single event's text, in two choices."""
    body: Body = {"max_tokens": 100, "ignore_eos": True, "return_token_ids": True, "n": 2}
    prompts: list[tuple[str, Body]] = [
        ("/v1/completions", {"prompt": [7, 8, 9]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ]
    for path, prompt in prompts:
        chunks = [event["choices"][0] for event in streamed(engine, path, **prompt, **body)]
        for expected in engine.post(path, json=prompt | body).json()["choices"]:
            parts = [chunk for chunk in chunks if chunk["index"] == expected["index"]]
            assert [token for chunk in parts for token in chunk.get("token_ids") or []] == expected["token_ids"]
            assert "".join(map(_content, parts)) == _content(expected)


def _content(choice: Body) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice["message"]).get("content", ""))


def metric(client: httpx.Client, name: str, label: str = "") -> float:
    lines = client.get("/metrics").text.splitlines()
    (sample,) = [line for line in lines if re.match(rf"{name}[ {{]", line) and label in line]
    return float(sample.split()[-1])


def test_shared_prefix_is_cached_to_the_block(engine: httpx.Client) -> None:
    prefix = list(range(1000, 1000 + 5 * BLOCK))
    assert cached(complete(engine, [*prefix, 1, 2, 3])) == 0
    assert cached(complete(engine, [*prefix, 4, 5, 6])) == 5 * BLOCK
    # The last token is always computed, and with it its block.
    assert cached(complete(engine, prefix)) == 4 * BLOCK
    # A prefix that differs in its third block.
    assert cached(complete(engine, [*prefix[: 2 * BLOCK], 7, *prefix[2 * BLOCK + 1 :]])) == 2 * BLOCK
    # Another tenant's cache.
    assert cached(complete(engine, [*prefix, 1, 2, 3], cache_salt="other")) == 0


def test_a_prompt_with_log_probabilities_reads_no_cache(engine: httpx.Client) -> None:
    prompt = list(range(600, 666, 2))  # two full blocks of 16
    requests: list[Body] = [{}, {"prompt_logprobs": 0}, {}]
    assert [cached(complete(engine, prompt, **fields)) for fields in requests] == [0, 0, 32]


def test_second_turn_hits_the_blocks_of_the_first_output(engine: httpx.Client) -> None:
    prompt = list(range(2000, 2030))
    first = complete(engine, prompt, max_tokens=50)
    output_ids = first["choices"][0]["token_ids"]
    second = complete(engine, [*prompt, *output_ids, *range(3000, 3020)])
    # 80 tokens, of which the last one's KV was never computed: 4 full blocks.
    assert cached(second) == (30 + 50 - 1) // BLOCK * BLOCK == 64
    assert cached(complete(engine, [*prompt, *output_ids[:20], 9, *output_ids[21:]])) == 50 // BLOCK * BLOCK


def test_chat_output_as_text_hits_cached_blocks(engine: httpx.Client) -> None:
    messages: list[Body] = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is a block? " * 9},
    ]
    body: Body = {"messages": messages, "max_tokens": 70, "return_token_ids": True}
    first = engine.post("/v1/chat/completions", json=body).json()
    choice = first["choices"][0]
    prompt_tokens, output_tokens = first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]
    assert first["prompt_token_ids"] == engine.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert len(choice["token_ids"]) == output_tokens
    messages += [choice["message"], {"role": "user", "content": [{"type": "text", "text": "And a "}, _text("chain?")]}]
    second = engine.post("/v1/chat/completions", json=body | {"messages": messages}).json()
    full_blocks = (prompt_tokens + output_tokens - 1) // BLOCK
    assert cached(second) == full_blocks * BLOCK > prompt_tokens


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def test_completion_stream_equals_vllms_format(engine: httpx.Client) -> None:
    prompt = list(range(4000, 4020))
    options = {"include_usage": True}
    events = streamed(
        engine,
        "/v1/completions",
        prompt=prompt,
        max_tokens=5,
        ignore_eos=True,
        return_token_ids=True,
        stream_options=options,
    )
    *chunks, last = events
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = complete(engine, prompt, max_tokens=5)["choices"][0]
    assert [token for choice in choices for token in choice["token_ids"]] == expected["token_ids"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompt] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in events}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_stream_format(engine: httpx.Client) -> None:
    body: Body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True}
    role, *chunks = streamed(engine, "/v1/chat/completions", **body, return_token_ids=True)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["object"] == "chat.completion.chunk"
    assert len(role["prompt_token_ids"]) == 4  # role, text, end of message, role of the response
    assert "token_ids" not in role["choices"][0]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    expected = engine.post("/v1/chat/completions", json=body).json()
    assert text == expected["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)


def test_every_prompt_and_choice_gets_a_response(engine: httpx.Client) -> None:
    prompts = [list(range(5000, 5040)), list(range(6000, 6020))]
    both = complete(engine, prompts, n=2, max_tokens=8)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in both["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    outputs = [tuple(choice["token_ids"]) for choice in both["choices"]]
    assert len(set(outputs)) == 4
    assert both["usage"]["prompt_tokens"] == 60
    assert both["usage"]["completion_tokens"] == 32
    alone = complete(engine, prompts[1], max_tokens=8)
    assert tuple(alone["choices"][0]["token_ids"]) == outputs[2]
    events = streamed(engine, "/v1/completions", prompt=["a b", "c d"], n=2, max_tokens=3, ignore_eos=True)
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


def test_finish_reason_stop(engine: httpx.Client) -> None:
    response = complete(engine, "tell me", ignore_eos=False, max_tokens=8000)
    choice = response["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] == len(choice["token_ids"]) < 8000
    # The end token is counted and not spoken.
    spoken = engine.post("/detokenize", json={"tokens": choice["token_ids"][:-1]}).json()["prompt"]
    assert choice["text"] == spoken
    longer = complete(engine, "tell me", ignore_eos=False, min_tokens=3000, max_tokens=8000)
    assert longer["usage"]["completion_tokens"] > 3000


def test_tokens_survive_detokenizing(engine: httpx.Client) -> None:
    text = "Ein Größenvergleich: 12345 Token — naïve? 日本"
    counted = engine.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert counted["max_model_len"] == 8192
    assert engine.post("/detokenize", json={"tokens": counted["tokens"]}).json() == {"prompt": text}
    assert complete(engine, text)["usage"]["prompt_tokens"] == counted["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", b'{"prompt": ', 400, "not JSON"),
        ("/v1/completions", b'{"prompt": []}', 400, "empty"),
        ("/v1/completions", json.dumps({"prompt": [5] * 8192}).encode(), 400, "maximum context length is 8192"),
        ("/v1/completions", b'{"prompt": "x", "model": "other"}', 404, "`other` does not exist"),
    ],
)  # fmt: skip
def test_errors_have_openais_format(engine: httpx.Client, path: str, body: bytes, status: int, message: str) -> None:
    response = engine.post(path, content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert message in error["message"]


def test_version_and_model_endpoints(engine: httpx.Client) -> None:
    assert engine.get("/health").status_code == 200
    assert "version" in engine.get("/version").json()
    (card,) = engine.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("kvtape-sim", 8192)
    labels = re.search(r"^vllm:cache_config_info{(.*)} 1", engine.get("/metrics").text, re.MULTILINE)
    assert labels
    assert {'block_size="16"', 'num_gpu_blocks="2048"', 'enable_prefix_caching="True"'} <= set(labels[1].split(","))
    assert complete(engine, "x", model="kvtape-sim")["model"] == "kvtape-sim"
    tagged = engine.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "abc"})
    assert tagged.json()["id"] == "cmpl-abc"


def test_metrics_count_tokens_and_hits(engine: httpx.Client) -> None:
    names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
    before = [metric(engine, f"vllm:{name}_total") for name in names]
    prompt = list(range(7000, 7000 + 3 * BLOCK + 2))
    for _ in range(2):
        complete(engine, prompt, max_tokens=6)
    after = [metric(engine, f"vllm:{name}_total") for name in names]
    gained = [late - early for early, late in zip(before, after, strict=True)]
    assert gained == [2 * 50, 2 * 6, 2 * 50, 3 * BLOCK]
    assert metric(engine, "vllm:kv_cache_usage_perc") == 0.0


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_blocks(sim_server: str, stream: bool) -> None:
    body = {"prompt": list(range(900)), "max_tokens": 30_000, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=sim_server, timeout=30.0) as client:
        aborted = metric(client, "vllm:request_success_total", 'finished_reason="abort"')
        sender = socket.create_connection((httpx.URL(sim_server).host, httpx.URL(sim_server).port or 0))
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        sender.sendall(head.encode() + content)
        while metric(client, "vllm:num_requests_running") == 0:
            pass
        assert metric(client, "vllm:kv_cache_usage_perc") > 0
        assert client.post("/reset_prefix_cache").json() == {"success": False}
        sender.close()
        while metric(client, "vllm:num_requests_running") > 0:
            pass
        assert metric(client, "vllm:kv_cache_usage_perc") == 0
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        assert metric(client, "vllm:request_success_total", 'finished_reason="abort"') == aborted + 1


def test_late_first_token_arrives_with_later_tokens(start_sim_server: StartSimServer, tmp_path: Path) -> None:
    # Half a second, in which the remaining seven are generated.
    costs = {"delivery_ms_per_prompt_token": 5.0, "t0_ms": 1.0, "per_decode_ms": 0.1, "frontend_base_ms": 0.0}
    flags = ("--latency-model", str(engine_model(tmp_path, **costs)))
    with start_sim_server(*flags) as url, httpx.Client(base_url=url, timeout=30.0) as client:
        body: Body = {"prompt": [7] * 100, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        events = streamed(client, "/v1/completions", **body)
    assert [len(event["choices"][0]["token_ids"]) for event in events if event["choices"]] == [8]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--listen", "nowhere"), "--listen: 'nowhere': expected HOST:PORT"),
        (("--speed", "fast"), "--speed fast: expected a number above 0, or max"),
        (("--num-gpu-blocks", "1"), "num_gpu_blocks: 1 is too small"),
    ],
)
def test_invalid_input_is_reported(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(InputError) as refused:
        main(["serve", *(flag.format(dir=tmp_path) for flag in flags)])
    assert message.format(dir=tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_signal_handlers_precede_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    # Between the two a Ctrl-C was lost now and then, and the server ran on.
    handled: list[bool] = []

    def listen(*_: object) -> socket.socket:
        handled.extend(loop_handles(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM))
        raise InputError("seen")

    monkeypatch.setattr("sim.serving.server._listen", listen)
    with pytest.raises(InputError, match="seen"):
        main(["serve", "--listen", "127.0.0.1:0"])
    assert handled == [True, True]


def loop_handles(handler: Any) -> bool:
    return handler not in (signal.SIG_DFL, signal.default_int_handler) and "_on_sigint" not in repr(handler)
