"""The engine's tokenizer, asked over a real socket: what is asked, what is kept, and what failure costs."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tap.prompts.chatmessages import UntokenizableError
from tap.prompts.enginetokenizer import EngineTokenizer


class TokenizingEngine(ThreadingHTTPServer):
    """Answers by ``answers`` (status and body, by path); keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {"/tokenize": (200, {"count": 3, "tokens": [7, 8, 9]})}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that did not wait is meant to."""


class Handler(BaseHTTPRequestHandler):
    server: TokenizingEngine
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requested.append((self.path, json.loads(body)))
        status, answer = self.server.answers[self.path]
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[TokenizingEngine]:
    with TokenizingEngine() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def tokenizer(engine: TokenizingEngine) -> Iterator[EngineTokenizer]:
    built = EngineTokenizer(engine.url, "vllm")
    yield built
    built.close()


def reason(tokenizer: EngineTokenizer, text: str) -> str:
    with pytest.raises(UntokenizableError) as caught:
        tokenizer.encode_text(text, add_special_tokens=True)
    return caught.value.reason


def test_token_ids_of_equal_prompts_are_cached(engine: TokenizingEngine, tokenizer: EngineTokenizer) -> None:
    for _ in range(3):
        assert list(tokenizer.encode_text("hello", add_special_tokens=True)) == [7, 8, 9]
    assert list(tokenizer.encode_text("hello", add_special_tokens=False)) == [7, 8, 9]
    assert engine.requested == [
        ("/tokenize", {"prompt": "hello", "add_special_tokens": True}),
        ("/tokenize", {"prompt": "hello", "add_special_tokens": False}),
    ]
    tokenizer.recent.check_integrity()


def test_chat_tokenize_request_has_all_prompt_fields(engine: TokenizingEngine, tokenizer: EngineTokenizer) -> None:
    messages, tools = [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f"}}]
    body = {
        "model": "m", "messages": messages, "tools": tools, "temperature": 0.5, "max_tokens": 9, "stream": True,
        "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "own": 1},
        "documents": [{"a": 1}],
    }  # fmt: skip
    tokenizer.encode_chat(body)
    tokenizer.encode_chat({"messages": messages, "continue_final_message": True})
    assert engine.requested == [
        (
            "/tokenize",
            {
                "model": "m", "messages": messages, "tools": tools, "add_generation_prompt": True,
                "chat_template_kwargs": {
                    "reasoning_effort": "none", "enable_thinking": True, "own": 1, "documents": [{"a": 1}]
                },
            },
        ),
        ("/tokenize", {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}),
    ]  # fmt: skip


def test_llamacpp_renders_the_chat_first(engine: TokenizingEngine) -> None:
    engine.answers["/apply-template"] = (200, {"prompt": "<user>x"})
    llamacpp = EngineTokenizer(engine.url, "llamacpp")
    assert list(llamacpp.encode_chat({"messages": [{"role": "user", "content": "x"}]})) == [7, 8, 9]
    llamacpp.close()
    assert [path for path, _ in engine.requested] == ["/apply-template", "/tokenize"]
    assert engine.requested[1][1] == {"content": "<user>x", "add_special": True, "parse_special": True}


@pytest.mark.parametrize("status", [401, 404])
def test_engine_without_tokenize_is_paused(engine: TokenizingEngine, status: int) -> None:
    engine.answers["/tokenize"] = (status, {})
    patient = EngineTokenizer(engine.url, "vllm", pause_s=3600)
    assert reason(patient, "a") == f"engine_tokenizer_http_{status}"
    assert reason(patient, "b") == "engine_tokenizer_paused"
    patient.close()
    hasty = EngineTokenizer(engine.url, "vllm", pause_s=0)
    assert reason(hasty, "a") == reason(hasty, "b") == f"engine_tokenizer_http_{status}"
    hasty.close()
    assert len(engine.requested) == 3


def test_timed_out_engine_is_paused(engine: TokenizingEngine) -> None:
    released = threading.Event()
    engine.answers = _Waiting(released)
    tokenizer = EngineTokenizer(engine.url, "vllm", timeout_s=0.05, pause_s=3600)
    assert reason(tokenizer, "a") == "engine_tokenizer_timeout"
    assert reason(tokenizer, "b") == "engine_tokenizer_paused"
    tokenizer.close()
    released.set()


class _Waiting(dict[str, tuple[int, Any]]):
    """Responds only on demand."""

    def __init__(self, released: threading.Event) -> None:
        super().__init__()
        self._released = released

    def __getitem__(self, path: str) -> tuple[int, Any]:
        self._released.wait()
        return 500, {}


@pytest.mark.parametrize(
    ("body", "why"),
    [({"messages": []}, "no_messages"), ({"messages": [{}], "chat_template": "x"}, "client_chat_template")],
)
def test_unsupported_prompts_are_not_sent(
    engine: TokenizingEngine, tokenizer: EngineTokenizer, body: dict[str, Any], why: str
) -> None:
    with pytest.raises(UntokenizableError) as caught:
        tokenizer.encode_chat(body)
    assert (caught.value.reason, engine.requested) == (why, [])
