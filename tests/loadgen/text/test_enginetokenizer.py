"""The engine's own tokenizer as vLLM, SGLang and llama.cpp serve it, each by the fields that it reads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from engines.control import ControlClient
from loadgen.text.tokenizer import EngineTokenizer

Question = dict[str, Any]
Serve = Callable[[str, Question], Question | None]


def ids(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def rendered(messages: list[dict[str, str]]) -> str:
    return " ".join(f"<{message['role']}> {message['content']}" for message in messages) + " <assistant>"


def vllm(path: str, asked: Question) -> Question | None:
    if path == "/tokenize":
        text = rendered(asked["messages"]) if "messages" in asked else asked["prompt"]
        return {"count": len(ids(text)), "max_model_len": 100, "tokens": ids(text)}
    return {"prompt": "spelled"} if path == "/detokenize" else None


def old_sglang(path: str, asked: Question) -> Question | None:
    """Takes a text only, and refuses what is none."""
    if path == "/tokenize" and "prompt" in asked:
        return {"tokens": ids(asked["prompt"]), "count": len(ids(asked["prompt"])), "max_model_len": 100}
    return {"text": "spelled"} if path == "/detokenize" else None


def llama_cpp(path: str, asked: Question) -> Question | None:
    """Finds no tokens where there is no content, and says so with 200."""
    if path == "/tokenize":
        begin = [1] if asked.get("add_special") else []
        return {"tokens": begin + ids(asked["content"]) if "content" in asked else []}
    if path == "/apply-template":
        return {"prompt": rendered(asked["messages"])}
    return {"content": "spelled"} if path == "/detokenize" else None


@contextmanager
def serving(answer: Serve) -> Iterator[ControlClient]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
            response = answer(self.path, asked)
            body = b"{}" if response is None else msgspec.json.encode(response)
            self.send_response(404 if response is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with ControlClient(f"http://127.0.0.1:{server.server_port}") as control:
            yield control
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


CHAT = [{"role": "user", "content": "how now"}]


@pytest.mark.parametrize("answer", [vllm, old_sglang, llama_cpp])
def test_texts_and_ids_on_every_engine(answer: Serve) -> None:
    with serving(answer) as control:
        tokenizer = EngineTokenizer(control, "m")
        assert tokenizer.encode("one three fifty") == [3, 5, 5]
        assert tokenizer.decode([3, 5]) == "spelled"


def test_chat_apis_of_engines() -> None:
    with serving(vllm) as control:
        assert EngineTokenizer(control, "m").encode_chat(CHAT) == ids(rendered(CHAT))
    with serving(llama_cpp) as control:
        # Its template writes text; the token that begins every text is the tokenizer's to add.
        assert EngineTokenizer(control, "m").encode_chat(CHAT) == [1, *ids(rendered(CHAT))]
