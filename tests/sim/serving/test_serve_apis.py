"""The embedded engine's APIs as the official client reads them: log probabilities, echoes, stop strings, errors."""

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


def test_tools_are_part_of_the_prompt_and_none_is_called(chat: Any) -> None:
    create, tool = chat.chat.completions.create, {"type": "function", "function": {"name": "seat", "parameters": {}}}
    plain = create(model=MODEL, messages=QUESTION, max_tokens=4)
    offered = create(model=MODEL, messages=QUESTION, max_tokens=4, tools=[tool], tool_choice="required")
    assert offered.usage.prompt_tokens > plain.usage.prompt_tokens
    assert offered.choices[0].message.content
    assert offered.choices[0].message.tool_calls is None


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


def test_errors_reach_the_client_as_its_own(chat: Any) -> None:
    with pytest.raises(client_library("openai").NotFoundError, match="unheard-of"):
        chat.completions.create(model="unheard-of", prompt="x")
    with pytest.raises(client_library("openai").NotFoundError):
        chat.responses.create(model=MODEL, input="x")
    with pytest.raises(client_library("openai").BadRequestError, match="expected 0 … 20"):
        chat.completions.create(model=MODEL, prompt="x", logprobs=30)


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
