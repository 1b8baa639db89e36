"""The embedded engine's APIs as the official client reads them: tools, errors, prompts that read no cache."""

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


def test_errors_reach_the_client_as_its_own(chat: Any) -> None:
    with pytest.raises(client_library("openai").NotFoundError, match="unheard-of"):
        chat.completions.create(model="unheard-of", prompt="x")
    with pytest.raises(client_library("openai").NotFoundError):
        chat.responses.create(model=MODEL, input="x")
    with pytest.raises(client_library("openai").BadRequestError, match="at least 1"):
        chat.completions.create(model=MODEL, prompt="x", max_tokens=0)


def test_a_prompt_with_log_probabilities_reads_no_cache(chat: Any) -> None:
    ask: Any = {"model": MODEL, "prompt": list(range(600, 666, 2)), "max_tokens": 1}  # two full blocks of 16

    def cached(**fields: Any) -> int:
        return int(chat.completions.create(**ask, **fields).usage.prompt_tokens_details.cached_tokens)

    assert [cached(), cached(extra_body={"prompt_logprobs": 0}), cached()] == [0, 0, 32]
