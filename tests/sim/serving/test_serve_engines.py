"""Several engines behind one port: who gets which request, and what that does to the caches."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest

from engines.routing import RULES, Query, Standing, least_loaded, longest_prefix, round_robin, session_hash

StartSimServer = Callable[..., AbstractContextManager[str]]
BLOCK = 16
IDLE = Standing(requests=0, kv_usage=0.0, cached_blocks=0)


def query(number: int = 0, session: str | None = None, blocks: int = 10) -> Query:
    return Query(number, session, list(range(blocks)))


def test_round_robin_goes_round() -> None:
    assert [round_robin(query(number), [IDLE] * 3) for number in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_looks_at_requests_then_at_memory_then_in_turn() -> None:
    assert least_loaded(query(), [Standing(3, 0.1, 0), Standing(2, 0.9, 0)]) == 1
    assert least_loaded(query(), [Standing(2, 0.5, 0), Standing(2, 0.4, 0)]) == 1
    assert [least_loaded(query(number), [IDLE] * 3) for number in range(4)] == [0, 1, 2, 0]


def test_a_session_stays_where_it_is_and_mostly_so_with_one_engine_more() -> None:
    names = [f"session {number}" for number in range(2000)]
    of_four = [session_hash(query(7, name), [IDLE] * 4) for name in names]
    of_five = [session_hash(query(9, name), [IDLE] * 5) for name in names]
    assert min(Counter(of_four).values()) > 400
    moved = sum(before != after for before, after in zip(of_four, of_five, strict=True))
    assert moved == of_five.count(4)  # nobody moves but to the new one
    # Without a session it is the first block that decides, without any block nothing but the turn.
    assert session_hash(query(1), [IDLE] * 4) == session_hash(query(2, blocks=3), [IDLE] * 4)
    assert [session_hash(query(number, blocks=0), [IDLE] * 4) for number in range(3)] == [0, 1, 2]


def test_the_longest_prefix_wins_unless_it_is_short_or_its_engine_overloaded() -> None:
    holder, other = Standing(4, 0.5, 6), Standing(0, 0.0, 2)
    assert longest_prefix(query(), [other, holder, other]) == 1
    # Two of ten blocks are too few to queue for.
    assert longest_prefix(query(), [Standing(4, 0.5, 2), IDLE]) == 1
    # Twelve requests against three: whatever it holds.
    assert longest_prefix(query(), [Standing(12, 0.5, 9), Standing(3, 0.0, 0)]) == 1
    assert longest_prefix(query(), [Standing(11, 0.5, 9), Standing(3, 0.0, 0)]) == 0
    # Several hold as much: the one with less to do.
    assert longest_prefix(query(), [Standing(5, 0.5, 6), Standing(4, 0.5, 6)]) == 1


@pytest.mark.parametrize("rule", RULES)
def test_one_engine_gets_everything(rule: str) -> None:
    assert RULES[rule](query(5, "a"), [Standing(9, 0.9, 0)]) == 0


@contextmanager
def engines(start: StartSimServer, rule: str) -> Iterator[httpx.Client]:
    flags = ("--speed", "max", "--block-size", str(BLOCK), "--num-gpu-blocks", "2048")
    with start(*flags, "--engines", "3", "--route", rule) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def ask(client: httpx.Client, prompt: list[int], session: str | None = None) -> tuple[int, int]:
    """Which engine served a prompt, and how many of its tokens were cached there."""
    headers = {} if session is None else {"X-Session-ID": session}
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body, headers=headers)
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-engine"]), cached


def test_taking_turns_fills_every_cache_with_the_same(start_sim_server: StartSimServer) -> None:
    prompt = list(range(1000, 1000 + 4 * BLOCK + 1))
    with engines(start_sim_server, "round-robin") as client:
        served = [ask(client, prompt) for _ in range(6)]
        assert served == [(0, 0), (1, 0), (2, 0), (0, 64), (1, 64), (2, 64)]
        text = client.get("/metrics").text
        tokens = re.findall(r'^vllm:generation_tokens_total{engine="(\d)",\S* (\S+)$', text, re.MULTILINE)
        assert tokens == [("0", "4.0"), ("1", "4.0"), ("2", "4.0")]
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        assert [ask(client, prompt) for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("rule", ["session", "prefix"])
def test_rules_that_know_the_conversation_find_its_cache(start_sim_server: StartSimServer, rule: str) -> None:
    with engines(start_sim_server, rule) as client:
        for session in range(4):
            history = list(range(5000 * session, 5000 * session + 4 * BLOCK + 1))
            first, cached = ask(client, history, f"s{session}")
            assert cached == 0
            for turn in range(3):
                grown = [*history, *range(4000 * turn, 4000 * turn + 2 * BLOCK)]
                assert ask(client, grown, f"s{session}") == (first, len(history) // BLOCK * BLOCK)
                history = grown
