"""The load as drawn: bounds, shapes, and a digest that tells two loads apart."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from loadgen.__main__ import parse_config
from loadgen.config import LoadConfig, Span, parse_span
from loadgen.draws import Vocabulary
from loadgen.workload import draw_workload
from tracefile import InputError

BASE = LoadConfig(url="http://x", trace=Path("t"), rate=2.0, number=20, seed=1)
SESSIONS = replace(
    BASE,
    pattern="multiturn",
    turns=3,
    prefix_count=2,
    prefix_tokens=100,
    prompt_tokens=Span(10, 20),
    output_tokens=Span(4, 8),
    think_s=Span(0.5, 1.5),
)


def test_sessions_stay_in_their_spans() -> None:
    sessions = list(draw_workload(SESSIONS))
    assert len(sessions) == 20
    assert {session.prefix for session in sessions} == {0, 1}
    assert all(len(session.turns) == 3 for session in sessions)
    turns = [turn for session in sessions for turn in session.turns]
    assert {turn.prompt_tokens for turn in turns} == set(range(10, 21))
    assert {turn.output_tokens for turn in turns} == set(range(4, 9))
    assert all(session.turns[0].think_ms == 0 for session in sessions)
    assert all(500 <= turn.think_ms <= 1500 for session in sessions for turn in session.turns[1:])
    assert len({turn.prompt_key for turn in turns}) == len(turns)


def test_the_digest_is_this_on_every_machine() -> None:
    assert draw_workload(SESSIONS).digest() == "da14a336098cc2ea438163e9da146ba88e1f274d29772082c899ea41e0f389eb"


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"rate": 3.0},
        {"number": 21},
        {"turns": 2},
        {"prefix_tokens": 101},
        {"prefix_count": 1},
        {"prompt_tokens": Span(10, 21)},
        {"output_tokens": Span(4, 9)},
        {"think_s": Span(0.5, 1.6)},
        {"vocabulary": Vocabulary(1000, 99_999)},
        {"api": "chat"},
        {"rate": None, "parallel": 4},
    ],
)
def test_another_load_has_another_digest(other: dict[str, object]) -> None:
    assert draw_workload(replace(SESSIONS, **other)).digest() != draw_workload(SESSIONS).digest()  # type: ignore[arg-type]


def test_what_is_not_the_load_leaves_the_digest() -> None:
    elsewhere = replace(SESSIONS, url="http://y", trace=Path("u"), timeout_s=None, overwrite=True)
    assert draw_workload(elsewhere).digest() == draw_workload(SESSIONS).digest()


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    longer = draw_workload(replace(SESSIONS, number=30))
    assert list(islice(longer, 20)) == list(draw_workload(SESSIONS))


def test_a_closed_loop_has_no_arrivals() -> None:
    closed = draw_workload(replace(BASE, rate=None, parallel=4))
    assert [session.due_ms for session in closed] == [None] * 20
    endless = draw_workload(replace(BASE, rate=None, parallel=4, number=None, duration_s=5.0))
    assert endless.planned() is None
    assert next(iter(endless)).turns == next(iter(closed)).turns
    assert len(endless.digest()) == 64


def test_spans() -> None:
    assert parse_span("--x", "7", minimum=1, whole=True) == Span(7, 7)
    assert parse_span("--x", "64:11000", minimum=1, whole=True) == Span(64, 11000)
    assert parse_span("--x", "0.2:1.0", minimum=0, whole=False) == Span(0.2, 1.0)


URL = ["--url", "http://127.0.0.1:1", "--trace", "t.jsonl"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "1"], "--duration, --number: both missing"),
        (["--number", "1"], "--rate: missing"),
        (["--rate", "0", "--number", "1"], "--rate: 0; expected a number above 0"),
        (["--rate", "nan", "--number", "1"], "--rate: nan"),
        (["--rate", "1", "--number", "0"], "--number: 0"),
        (["--rate", "1", "--number", "1", "--prompt-tokens", "9:3"], "--prompt-tokens: '9:3'"),
        (["--rate", "1", "--number", "1", "--prompt-tokens", "0"], "--prompt-tokens: '0'"),
        (["--rate", "1", "--number", "1", "--output-tokens", "1.5"], "--output-tokens: '1.5'"),
        (["--rate", "1", "--number", "1", "--think-s=-1"], "--think-s: '-1'"),
        (["--rate", "1", "--number", "1", "--prefix-count", "2"], "2 prefixes of 0 tokens"),
        (["--rate", "1", "--number", "1", "--turns", "2"], "--turns: 2 with --pattern poisson"),
        (["--rate", "1", "--number", "1", "--vocab-high", "10"], "--vocab-low, --vocab-high"),
    ],
)
def test_bad_flags_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_config([*URL, *argv])
    assert message in str(error.value)
