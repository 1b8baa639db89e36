"""Servers of text alone, as ``transformers serve`` and ``mlx_lm.server`` are: said where they end a run, or used."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.__main__ import main
from tests.fakes.threads import QuietHandler, serving
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError

FLAGS = ("--rate", "200", "--number", "4", "--prompt-tokens", "8", "--output-tokens", "3")


class TextServer(QuietHandler):
    """Streams end in a chunk with ``finish_reason`` and usage, and no ``[DONE]``; cached tokens are a constant 0."""

    def do_GET(self) -> None:
        models = self.path == "/v1/models"
        self.reply(200 if models else 404, b'{"object": "list", "data": []}' if models else b"", "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            status = 200 if isinstance(body["prompt"], str) else 400
            self.reply(status, b'{"choices": [{"text": "a", "finish_reason": "length"}]}', "application/json")
            return
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
        events: list[dict[str, object]] = [
            {"choices": [{"index": 0, "delta": {"content": word}}]} for word in ("a", "b", "c")
        ]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": usage})
        text = ": keepalive 1/2\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(text.encode()), text.encode()))


@contextlib.contextmanager
def text_server() -> Iterator[str]:
    with serving(TextServer) as url:
        yield url


def test_ids_are_refused_and_the_message_names_text(tmp_path: Path) -> None:
    with text_server() as url, pytest.raises(InputError) as refused:
        main(["--url", url, "--model", "m", "-o", str(tmp_path / "t"), *FLAGS])
    assert str(refused.value) == (
        "--api completions: the engine accepts text but no token ids (HTTP 400); expected --api chat, with --tokenizer "
        "PATH for exact lengths"
    )


def test_stream_with_finish_reason_is_complete_without_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = ("--api", "chat", "--turns", "2", "--pattern", "multiturn")
    with text_server() as url:
        assert main(["--url", url, "--model", "m", "-o", str(tmp_path / "t"), *FLAGS, *chat]) == 0
    records = load_trace(tmp_path / "t")[1]
    assert {(record.status, record.finish_reason, record.cached_tokens) for record in records} == {("ok", "length", 0)}
    assert len(records) == 8  # later turns are sent, too
    assert "cached tokens: 0 in all 8 reports, though prompts repeat earlier ones" in capsys.readouterr().out
