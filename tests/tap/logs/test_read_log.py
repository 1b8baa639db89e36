"""``tap read-log``: request logs of several shapes as traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from tap.__main__ import main
from tap.logs.rows import LogRows
from tests.fakes.vocabularies import write_model
from tracefile.analysis.checking import check_trace
from tracefile.files.reading import load_trace, open_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

SYSTEM = "You are a helpful assistant. Today is {day}. Follow the rules below with care, and use English only, always."
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
AT_S = 1_763_769_605


def chat(user: str, day: str = "Monday") -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM.format(day=day)}, {"role": "user", "content": user}]
    return {"model": "m", "messages": messages}


def log(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model("deepseek", tmp_path_factory.mktemp("model"), TEMPLATE))


def read(
    tmp_path: Path, *rows: Any, tokenizer: str = "ids", flags: tuple[str, ...] = ("--block-size", "4")
) -> list[Record]:
    flags = ("--tokenizer", tokenizer, *flags)
    key, out = tmp_path / "key", tmp_path / "out.jsonl"
    source = log(tmp_path / "log.jsonl", *rows)
    assert main(["read-log", str(source), "-o", str(out), "--overwrite", "--key-file", str(key), *flags]) == 0
    assert "Monday" not in out.read_text()
    with open_trace(out) as reader:
        assert list(check_trace(reader)) == []
    return load_trace(out)[1]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda body: body,
        lambda body: body["messages"],
        lambda body: {"custom_id": body["messages"][1]["content"], "url": "/v1/chat/completions", "body": body},
        lambda body: {"request_json": json.dumps(body), "model_name": "m"},
    ],
    ids=["bodies", "messages", "batch", "gateway"],
)  # fmt: skip
def test_all_row_forms_give_the_same_prompt(tmp_path: Path, model: str, wrap: Any) -> None:
    flags = ("--model", "m")
    plain = read(tmp_path, chat("hello"), chat("who are you"), tokenizer=model, flags=flags)
    wrapped = read(tmp_path, wrap(chat("hello")), wrap(chat("who are you")), tokenizer=model, flags=flags)
    assert [actual.block_hashes for actual in wrapped] == [actual.block_hashes for actual in plain]
    assert plain[0].block_hashes is not None
    assert plain[1].block_hashes is not None
    assert plain[0].block_hashes[0] == plain[1].block_hashes[0]
    assert {actual.endpoint for actual in wrapped} == {"/v1/chat/completions"}


def test_times_ids_and_usage_of_a_gateways_row(tmp_path: Path) -> None:
    response = {
        "choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 30, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}},
    }
    first, second = read(
        tmp_path,
        {"timestamp": 1_763_769_605.5, "latency_ms": 250, "request_json": chat("a"), "response_json": response,
         "session_id": "s", "request_id": "r"},
        {"timestamp": "2025-11-22T00:00:07Z", "status_code": 503, "request_json": chat("b"), "session_id": "s"},
    )  # fmt: skip
    assert (first.arrival_ms, first.e2e_ms, first.http_status) == (5_500.0, 250.0, 200)
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens, first.finish_reason) == (30, 16, 2, "stop")
    assert (second.arrival_ms, second.status, second.error) == (7_000.0, "error", "http_503")
    assert (second.session_id, second.parent_id, second.turn) == (first.session_id, first.request_id, 2)


def test_batch_output_is_read_with_its_request(tmp_path: Path) -> None:
    body = {"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 20, "completion_tokens": 1}}
    (actual,) = read(tmp_path, {"body": chat("a"), "response": {"status_code": 200, "body": body}})
    assert (actual.prompt_tokens, actual.output_tokens, actual.http_status) == (20, 1, 200)


def test_log_without_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = read(tmp_path, chat("a"), {"note": "no request"}, chat("b"))
    assert [actual.arrival_ms for actual in records] == [0.0, 2000.0]
    printed = capsys.readouterr().err
    assert "1 rows skipped: no request body" in printed
    assert "no times in the log: requests are spaced 1 s apart" in printed


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"note": 1}], "no requests; expected rows with a prompt, messages or input"),
        ([{"ts": AT_S, "body": chat("a")}, {"ts": AT_S - 1, "body": chat("b")}], ":2: earlier than the previous row"),
        ([{"ts": AT_S, "end_time": AT_S - 1, "body": chat("a")}], ":1: ends before it starts"),
    ],
)  # fmt: skip
def test_invalid_logs_are_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, *rows)


def test_tokenizer_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a log has no engine"):
        read(tmp_path, chat("a"), tokenizer="engine")


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"messages": [], "system": "s"}, "/v1/messages"),
        ({"url": "https://gateway/team-a/v1/messages", "body": {"messages": []}}, "/v1/messages"),
    ],
)
def test_the_api_of_a_row(tmp_path: Path, body: dict[str, Any], endpoint: str) -> None:
    (exchange,) = LogRows(log(tmp_path / "l", body))
    assert exchange.endpoint == endpoint


def test_branch_at_a_date_in_the_system_prompt_is_token_exact(tmp_path: Path, model: str) -> None:
    rows = (chat("hello"), chat("hello", day="Friday"))
    _, second = read(tmp_path, *rows, tokenizer=model)
    # "<system>You are a helpful assistant. Today is" are some ten tokens.
    assert second.branch_tokens is not None
    assert 8 <= second.branch_tokens <= 14
