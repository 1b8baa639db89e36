"""Several engines behind a single port: routing of requests, and its effect on the caches."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest

StartSimServer = Callable[..., AbstractContextManager[str]]
BLOCK = 16


@contextmanager
def engines(start: StartSimServer, rule: str) -> Iterator[httpx.Client]:
    flags = ("--speed", "max", "--block-size", str(BLOCK), "--num-gpu-blocks", "2048")
    with start(*flags, "--engines", "3", "--route", rule) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def complete(client: httpx.Client, prompt: list[int], session: str | None = None) -> tuple[int, int]:
    """Which engine served a prompt, and how many of its tokens were cached there."""
    headers = {} if session is None else {"X-Session-ID": session}
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    response = client.post("/v1/completions", json=body, headers=headers)
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(response.headers["x-engine"]), cached


def test_round_robin_duplicates_prefixes(start_sim_server: StartSimServer) -> None:
    prompt = list(range(1000, 1000 + 4 * BLOCK + 1))
    with engines(start_sim_server, "round-robin") as client:
        served = [complete(client, prompt) for _ in range(6)]
        assert served == [(0, 0), (1, 0), (2, 0), (0, 64), (1, 64), (2, 64)]
        text = client.get("/metrics").text
        tokens = re.findall(r'^vllm:generation_tokens_total{engine="(\d)",\S* (\S+)$', text, re.MULTILINE)
        assert tokens == [("0", "4.0"), ("1", "4.0"), ("2", "4.0")]
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        assert [complete(client, prompt) for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("rule", ["session", "prefix", "workload"])
def test_session_policies_hit_the_cache(start_sim_server: StartSimServer, rule: str) -> None:
    with engines(start_sim_server, rule) as client:
        for session in range(4):
            history = list(range(5000 * session, 5000 * session + 4 * BLOCK + 1))
            first, cached = complete(client, history, f"s{session}")
            assert cached == 0
            for turn in range(3):
                grown = [*history, *range(4000 * turn, 4000 * turn + 2 * BLOCK)]
                assert complete(client, grown, f"s{session}") == (first, len(history) // BLOCK * BLOCK)
                history = grown
