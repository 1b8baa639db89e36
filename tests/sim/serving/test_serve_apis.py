"""The embedded engine's APIs as the official clients read them: Responses, Messages, tool calls, log probabilities."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests.fakes.clientlibraries import client_library

StartSimServer = Callable[..., AbstractContextManager[str]]
MODEL = "kvtape-sim"
BLOCK = 16
QUESTION: list[Any] = [{"role": "user", "content": "A seat by the window, please, and one beside it. " * 4}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "row": {"type": "string", "enum": ["a", "b"]},
        "seats": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 9}, "minItems": 2},
        "by": {"$ref": "#/$defs/side"},
    },
    "required": ["row", "seats", "by"],
    "$defs": {"side": {"anyOf": [{"const": "aisle"}, {"type": "null"}]}},
}
CHAT_TOOL = {"type": "function", "function": {"name": "seat", "parameters": PARAMETERS}}
RESPONSES_TOOL = {"type": "function", "name": "seat", "parameters": PARAMETERS, "strict": False}
MESSAGES_TOOL = {"name": "seat", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def url(start_sim_server: StartSimServer) -> Iterator[str]:
    flags = ("--speed", "max", "--block-size", str(BLOCK), "--num-gpu-blocks", "2048", "--max-model-len", "8192")
    with start_sim_server(*flags) as address:
        yield address


@pytest.fixture(autouse=True)
def _empty_cache(url: str) -> None:
    assert httpx.post(f"{url}/reset_prefix_cache").json() == {"success": True}


@pytest.fixture
def chat(url: str) -> Iterator[Any]:
    with client_library("openai").OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(url: str) -> Iterator[Any]:
    with client_library("anthropic").Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def check_arguments(arguments: Any) -> None:
    """What the tool's schema demands."""
    assert arguments["row"] in ("a", "b")
    assert len(arguments["seats"]) >= 2
    assert all(3 <= seat <= 9 for seat in arguments["seats"])
    assert arguments["by"] == "aisle"


# Chats.


@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "seat"}}, "stop")],
    ids=["required", "named"],
)
def test_a_chat_calls_the_tool_that_it_must(chat: Any, choice: Any, finish_reason: str) -> None:
    create = chat.chat.completions.create
    whole = create(model=MODEL, messages=QUESTION, tools=[CHAT_TOOL], tool_choice=choice)
    [call] = whole.choices[0].message.tool_calls
    check_arguments(json.loads(call.function.arguments))
    # As vLLM has it: a tool of the model's choice, or one that was named.
    assert whole.choices[0].finish_reason == finish_reason
    chunks = list(create(model=MODEL, messages=QUESTION, tools=[CHAT_TOOL], tool_choice=choice, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function.name] == ["seat"]
    assert parts[0].id == call.id
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert len(parts) > 3
    assert chunks[-1].choices[0].finish_reason == finish_reason


def test_a_call_sent_back_hits_the_blocks_it_filled(chat: Any) -> None:
    create = chat.chat.completions.create
    ask = {"model": MODEL, "tools": [CHAT_TOOL], "tool_choice": "required"}
    first = create(messages=QUESTION, **ask)
    message = first.choices[0].message.model_dump(exclude_none=True)
    answered = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "taken"}
    second = create(messages=[*QUESTION, message, answered], max_tokens=2, model=MODEL, tools=[CHAT_TOOL])
    full = (first.usage.prompt_tokens + first.usage.completion_tokens - 1) // BLOCK * BLOCK
    assert second.usage.prompt_tokens_details.cached_tokens == full
    assert second.choices[0].message.tool_calls is None


def test_a_call_can_be_cut_short_or_drawn_out(chat: Any) -> None:
    create = chat.chat.completions.create
    ask = {"model": MODEL, "messages": QUESTION, "tools": [CHAT_TOOL], "tool_choice": "required"}
    cut = create(**ask, max_tokens=6)
    assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (6, "length")
    long = create(**ask, max_tokens=90, extra_body={"ignore_eos": True})
    assert (long.usage.completion_tokens, long.choices[0].finish_reason) == (90, "length")
    check_arguments(json.loads(long.choices[0].message.tool_calls[0].function.arguments))  # blanks behind are JSON too


def test_chats_tell_log_probabilities(chat: Any) -> None:
    ask = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "logprobs": True, "top_logprobs": 3, "n": 2}
    whole = chat.chat.completions.create(**ask)
    for choice in whole.choices:
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content
        assert [len(token.top_logprobs) for token in tokens] == [3] * 4
        assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in tokens)
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chat.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert [streamed[0], streamed[1]] == [choice.logprobs.content for choice in whole.choices]


def test_completions_tell_log_probabilities(chat: Any) -> None:
    ask = {"model": MODEL, "prompt": "once upon", "max_tokens": 5, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = chat.completions.create(**ask).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.text_offset == [0, 4, 8, 12, 16]  # a blank and three letters each
    assert [len(top) for top in whole.logprobs.top_logprobs] == [2] * 5
    chunks = [chunk.choices[0].logprobs for chunk in chat.completions.create(**ask, stream=True)]
    assert [offset for chunk in chunks for offset in chunk.text_offset] == whole.logprobs.text_offset
    assert [value for chunk in chunks for value in chunk.token_logprobs] == whole.logprobs.token_logprobs


# Responses.


def test_a_response_whole_and_streamed(chat: Any) -> None:
    ask = {"model": MODEL, "input": QUESTION[0]["content"], "instructions": "Be brief.", "max_output_tokens": 40}
    whole = chat.responses.create(**ask)
    events = list(chat.responses.create(**ask, stream=True))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(delta.delta for delta in deltas) == events[-1].response.output_text == whole.output_text
    assert whole.usage.output_tokens == 40
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[-1].response.usage.input_tokens == whole.usage.input_tokens
    # The same prompt again: all full blocks but that of the last token.
    assert (
        events[-1].response.usage.input_tokens_details.cached_tokens == (whole.usage.input_tokens - 1) // BLOCK * BLOCK
    )


def test_a_response_calls_a_tool_and_takes_its_result(chat: Any) -> None:
    ask = {"model": MODEL, "input": QUESTION, "tools": [RESPONSES_TOOL], "tool_choice": "required"}
    whole = chat.responses.create(**ask)
    [call] = whole.output
    check_arguments(json.loads(call.arguments))
    assert (call.type, call.name, whole.status) == ("function_call", "seat", "completed")
    events = list(chat.responses.create(**ask, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments == events[-1].response.output[0].arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "taken"}
    history = [*QUESTION, call.model_dump(exclude_none=True), result]
    again = chat.responses.create(model=MODEL, input=history, tools=[RESPONSES_TOOL], max_output_tokens=3)
    full = (whole.usage.input_tokens + whole.usage.output_tokens - 1) // BLOCK * BLOCK
    assert again.usage.input_tokens_details.cached_tokens == full


def test_responses_are_not_stored(chat: Any) -> None:
    with pytest.raises(client_library("openai").BadRequestError, match="stores no responses"):
        chat.responses.create(model=MODEL, input="x", previous_response_id="resp_1")


# Messages.


def test_a_message_whole_and_streamed(claude: Any) -> None:
    ask = {"model": MODEL, "messages": QUESTION, "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 30}
    whole = claude.messages.create(**ask)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 30)
    with claude.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream if not event.type.startswith(("text", "input_json"))]
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text
    assert [kind for kind in kinds if kind != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    prompt_tokens = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert streamed.usage.cache_read_input_tokens == (prompt_tokens - 1) // BLOCK * BLOCK
    assert streamed.usage.input_tokens == prompt_tokens - streamed.usage.cache_read_input_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.")
    assert counted.input_tokens == prompt_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "seat"}])
def test_a_message_calls_a_tool_and_takes_its_result(claude: Any, choice: Any) -> None:
    ask = {"model": MODEL, "messages": QUESTION, "max_tokens": 900, "tools": [MESSAGES_TOOL], "tool_choice": choice}
    whole = claude.messages.create(**ask)
    [call] = whole.content
    check_arguments(call.input)
    assert (call.type, call.name, whole.stop_reason) == ("tool_use", "seat", "tool_use")
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert (streamed.content[0].input, streamed.stop_reason) == (call.input, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "taken"}]}
    history = [
        *QUESTION,
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result, {"type": "text", "text": "Another one?"}]},
    ]
    again = claude.messages.create(model=MODEL, messages=history, max_tokens=3, tools=[MESSAGES_TOOL])
    prompt_tokens = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    full = (prompt_tokens + whole.usage.output_tokens - 1) // BLOCK * BLOCK
    assert again.usage.cache_read_input_tokens == full


def test_errors_reach_each_client_as_its_own(chat: Any, claude: Any) -> None:
    with pytest.raises(client_library("anthropic").NotFoundError, match="unheard-of"):
        claude.messages.create(model="unheard-of", max_tokens=5, messages=QUESTION)
    tools = {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "x"}}
    with pytest.raises(client_library("anthropic").BadRequestError, match="no tool is named 'x'"):
        claude.messages.create(model=MODEL, max_tokens=5, messages=QUESTION, **tools)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(client_library("anthropic").BadRequestError, match="'image'"):
        claude.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(client_library("openai").NotFoundError, match="unheard-of"):
        chat.responses.create(model="unheard-of", input="x")
    with pytest.raises(client_library("openai").BadRequestError, match="required, but there are no tools"):
        chat.chat.completions.create(model=MODEL, messages=QUESTION, tool_choice="required")
    with pytest.raises(client_library("openai").BadRequestError, match="expected 0 … 20"):
        chat.completions.create(model=MODEL, prompt="x", logprobs=30)


def test_auto_calls_as_often_as_the_server_was_told(start_sim_server: StartSimServer) -> None:
    def calls(share: str) -> int:
        with start_sim_server("--speed", "max", "--tool-share", share) as url, httpx.Client(base_url=url) as client:
            called = 0
            for number in range(20):
                body = {"messages": [{"role": "user", "content": str(number)}], "tools": [CHAT_TOOL], "max_tokens": 300}
                [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
                called += choice["finish_reason"] == "tool_calls"
            return called

    assert calls("1") == 20
    assert 0 < calls("0.5") < 20


def test_a_completion_echoes_its_prompt_with_log_probabilities_and_reads_no_cache(chat: Any) -> None:
    create = chat.completions.create
    ids = list(range(600, 666, 2))  # two full blocks of 16
    create(model=MODEL, prompt=ids, max_tokens=1)
    scored = create(model=MODEL, prompt=ids, max_tokens=1, echo=True, logprobs=1)
    assert scored.usage.prompt_tokens_details.cached_tokens == 0
    [choice] = scored.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[-2:] == [
        len(choice.text) - 4 - len(choice.logprobs.tokens[-2]),
        len(choice.text) - 4,
    ]
    assert (choice.logprobs.token_logprobs[0], choice.logprobs.top_logprobs[0]) == (None, None)
    likeliest = [
        value == max(top.values())
        for value, top in zip(choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True)
    ]
    assert len(likeliest) == 33
    assert set(likeliest) == {True, False}
    told = create(model=MODEL, prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices[0].prompt_logprobs
    assert told[0] is None
    assert [top[str(one)]["logprob"] for one, top in zip(ids[1:], told[1:], strict=True)] == (
        choice.logprobs.token_logprobs[1:33]
    )
    options = {"stream_options": {"include_usage": True}, "extra_body": {"prompt_logprobs": 0}}
    *_, last = create(model=MODEL, prompt=ids, max_tokens=1, stream=True, **options)  # vLLM refuses 1 beside a stream
    assert last.usage.prompt_tokens_details.cached_tokens == 0
    cached = create(model=MODEL, prompt=ids, max_tokens=1).usage.prompt_tokens_details.cached_tokens
    assert cached == 32


def test_a_stop_string_is_not_spoken_whole_or_streamed(chat: Any) -> None:
    ask = {"model": MODEL, "prompt": "once upon", "max_tokens": 9, "extra_body": {"ignore_eos": True}}
    free = chat.completions.create(**ask).choices[0].text
    [whole] = chat.completions.create(**ask, stop=free[14:18]).choices
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (free[:14], "stop", free[14:18])
    streamed = chat.completions.create(**ask, stop=free[14:18], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == free[:14]
