"""The load as drawn: bounds, shapes, and a digest that tells two loads apart."""

import shlex
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from loadgen.core.draws import Stream, below, draw
from loadgen.core.job import Shard, add_shares
from loadgen.core.lengths import LengthDistribution
from loadgen.core.request import origin_of
from loadgen.core.vocabulary import Vocabulary
from loadgen.loadflags import parse_config
from loadgen.plan.config import LoadConfig
from loadgen.plan.loadjob import load_name
from loadgen.plan.workload import DIGESTED_SESSIONS, Workload
from tracefile import InputError

BASE = LoadConfig(url="http://x", trace=Path("t"), rate=2.0, number=20, seed=1)
SESSIONS = replace(
    BASE,
    pattern="multiturn",
    turns=LengthDistribution(3, 3),
    prefix_count=2,
    prefix_tokens=100,
    prompt_tokens=LengthDistribution(10, 20),
    output_tokens=LengthDistribution(4, 8),
    think_s=LengthDistribution(0.5, 1.5),
)


def digest(config: LoadConfig, shards: int = 1) -> str:
    return add_shares([Workload(config, Shard(index, shards)).survey().digest_share for index in range(shards)])


def test_sessions_stay_in_their_spans() -> None:
    sessions = list(Workload(SESSIONS))
    assert [session.index for session in sessions] == list(range(20))
    assert {session.prefix for session in sessions} == {0, 1}
    assert all(len(session.turns) == 3 for session in sessions)
    turns = [turn for session in sessions for turn in session.turns]
    assert {turn.prompt_tokens for turn in turns} == set(range(10, 21))
    assert {turn.output_tokens for turn in turns} == set(range(4, 9))
    assert all(session.turns[0].think_ms == 0 for session in sessions)
    assert all(500 <= turn.think_ms <= 1500 for session in sessions for turn in session.turns[1:])
    assert len({turn.prompt_key for turn in turns}) == len(turns)


@pytest.mark.parametrize("pattern", ["multiturn", "calibration"])
def test_another_nonce_changes_tokens_and_nothing_else(pattern: str) -> None:
    config = SESSIONS
    if pattern == "calibration":
        prompts = LengthDistribution(64, 10_000)
        config = LoadConfig(url="http://x", trace=Path("t"), pattern="calibration", parallel=4, prompt_tokens=prompts)
    one, other = (list(Workload(replace(config, nonce=nonce))) for nonce in (None, "7"))
    assert [(each.due_ms, each.prefix) for each in one] == [(each.due_ms, each.prefix) for each in other]
    assert not {each.prefix_key for each in one} & {each.prefix_key for each in other}
    turns, others = ([turn for each in sessions for turn in each.turns] for sessions in (one, other))
    assert not {turn.prompt_key for turn in turns} & {turn.prompt_key for turn in others}
    without_key = [replace_struct(turn, prompt_key=0) for turn in turns]
    assert without_key == [replace_struct(turn, prompt_key=0) for turn in others]
    assert load_name(config) == load_name(replace(config, nonce="7"))  # requests keep their ids


def test_sessions_are_what_single_draws_make() -> None:
    for session in Workload(SESSIONS):
        assert session.prefix == below(draw(1, Stream.PREFIX_CHOICE, session.index), 2)
        assert session.prefix_key == draw(1, Stream.PREFIX_TOKENS, session.prefix or 0)
        for number, turn in enumerate(session.turns):
            assert turn.prompt_key == draw(1, Stream.PROMPT_TOKENS, session.index, number)
            assert turn.prompt_tokens == 10 + below(draw(1, Stream.PROMPT_LENGTH, session.index, number), 11)


def test_turns_may_differ_from_session_to_session() -> None:
    sessions = list(Workload(replace(SESSIONS, turns=LengthDistribution(1, 4), number=200)))
    assert {len(session.turns) for session in sessions} == {1, 2, 3, 4}
    assert Workload(replace(SESSIONS, turns=LengthDistribution(1, 4), number=200)).survey().planned == sum(
        len(session.turns) for session in sessions
    )


def test_the_digest_is_this_on_every_machine() -> None:
    assert digest(SESSIONS) == "05f3206a60cb2914ab13a3696e2498e930c0dfe4cac3cbf8349eb830d665a781"


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"rate": 3.0},
        {"number": 21},
        {"turns": LengthDistribution(2, 2)},
        {"turns": LengthDistribution(3, 4)},
        {"prefix_tokens": 101},
        {"prefix_count": 1},
        {"prompt_tokens": LengthDistribution(10, 21)},
        {"output_tokens": LengthDistribution(4, 9)},
        {"think_s": LengthDistribution(0.5, 1.6)},
        {"vocabulary": Vocabulary(1000, 99_999)},
        {"api": "chat"},
        {"dataset_offset": 1},
        {"rate": None, "parallel": 4},
        {"pattern": "constant"},
        {"pattern": "gamma", "burstiness": 0.5},
        {"pattern": "burst", "rate": None, "burst_size": 4, "burst_every_s": 1.0},
        {"pattern": "ramp", "rate_to": 3.0, "duration_s": 60.0},
    ],
)
def test_another_load_has_another_digest(other: dict[str, object]) -> None:
    assert digest(replace(SESSIONS, **other)) != digest(SESSIONS)  # type: ignore[arg-type]


def test_what_is_not_the_load_leaves_the_digest() -> None:
    elsewhere = replace(SESSIONS, url="http://y", trace=Path("u"), timeout_s=None, overwrite=True)
    assert digest(elsewhere) == digest(SESSIONS)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 3000), st.booleans())
def test_shards_are_the_whole_however_many_there_are(shards: int, number: int, closed: bool) -> None:
    config = replace(SESSIONS, number=number, turns=LengthDistribution(1, 2), rate=None if closed else 2.0, parallel=9)
    parts = [list(Workload(config, Shard(index, shards))) for index in range(shards)]
    whole = list(Workload(config))
    assert sorted((session for part in parts for session in part), key=lambda session: session.index) == whole
    for index, part in enumerate(parts):
        assert [session.index % shards for session in part] == [index] * len(part)
    assert digest(config, shards) == digest(config)
    planned = [Workload(config, Shard(index, shards)).survey().planned or 0 for index in range(shards)]
    assert sum(planned) == sum(len(session.turns) for session in whole)


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    longer = Workload(replace(SESSIONS, number=3000))
    assert list(islice(longer, 20)) == list(Workload(SESSIONS))


def test_an_offset_begins_later_in_the_same_sessions() -> None:
    later = list(Workload(replace(SESSIONS, dataset_offset=5)))
    assert [session.turns for session in later[:15]] == [session.turns for session in list(Workload(SESSIONS))[5:]]
    assert [session.due_ms for session in later] == [session.due_ms for session in Workload(SESSIONS)]


def test_a_closed_loop_has_no_arrivals() -> None:
    closed = Workload(replace(BASE, rate=None, parallel=4))
    assert [session.due_ms for session in closed] == [None] * 20
    endless = Workload(replace(BASE, rate=None, parallel=4, number=None, duration_s=5.0))
    assert endless.survey().planned is None
    assert next(iter(endless)).turns == next(iter(closed)).turns


def test_a_plan_without_an_end_in_sight_is_named_by_its_beginning() -> None:
    long = replace(BASE, rate=1e6, number=None, duration_s=1e6)
    survey = Workload(long).survey()
    assert survey.planned is None
    shorter = replace(BASE, rate=1e6, number=DIGESTED_SESSIONS)
    assert survey.digest_share == Workload(shorter).survey().digest_share


def test_a_series_ends_with_its_last_point_unless_a_bound_is_given() -> None:
    series = replace(BASE, pattern="series", rate=None, number=None, rate_series=((0, 2), (10, 4)))
    assert series.ends_s == 10
    assert (replace(series, duration_s=20.0).ends_s, replace(series, number=100).ends_s) == (20, None)
    evenly = replace(series, spacing="constant")
    assert [len(list(Workload(config))) for config in (evenly, replace(evenly, duration_s=20.0))] == [20, 60]
    assert len(list(Workload(replace(evenly, number=100)))) == 100


def test_arrivals_are_in_order_in_every_shard() -> None:
    config = replace(BASE, pattern="gamma", burstiness=0.2, number=5000)
    for index in range(3):
        due = [session.due_ms for session in Workload(config, Shard(index, 3))]
        assert np.all(np.diff(np.array(due)) >= 0)


URL = ["--url", "http://127.0.0.1:1", "-o", "t.jsonl"]


CLOSED = ["--parallel", "1", "--number", "1"]
OPEN = ["--rate", "1", "--number", "1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "1"], "--duration, --number: both missing"),
        (["--pattern", "gamma", "--burstiness", "2", "--number", "1"], "--rate: missing"),
        (["--rate", "0", "--number", "1"], "--rate: 0; expected a number above 0"),
        (["--rate", "nan", "--number", "1"], "--rate: nan"),
        (["--rate", "fast", "--number", "1"], "--rate: 'fast'"),
        (["--rate", "1", "--number", "0"], "--number: 0"),
        (["--group-size", "0"], "--group-size: 0; expected 1 to 16384"),
        (["--rate", "1e300", "--number", "1"], "--rate: 1e+300; expected at most 1,000,000 a second"),
        (["--parallel-sessions", "0"], "--parallel-sessions: 0; expected"),
        ([*OPEN, "--prompt-tokens", "9:3"], "--prompt-tokens: '9:3'"),
        ([*OPEN, "--prompt-tokens", "0"], "--prompt-tokens: '0'"),
        ([*OPEN, "--output-tokens", "1.5"], "--output-tokens: '1.5'"),
        ([*OPEN, "--think=-1s"], "--think: '-1s'"),
        ([*OPEN, "--think", "1:5s"], "--think: '1:5s': 1 has no unit; expected 1s or 1ms"),
        ([*OPEN, "--prefix-count", "2"], "2 prefixes of 0 tokens"),
        ([*OPEN, "--prefix-tokens", "99999999"], "--prefix-tokens: 99999999; expected at most 16,777,216"),
        ([*OPEN, "--vocab-high", "10"], "--vocab-low, --vocab-high"),
        ([*OPEN, "--turns", "2", "--min-turns", "1"], "--turns: with --min-turns or --max-turns"),
        ([*OPEN, "--min-turns", "3", "--max-turns", "2"], "--min-turns, --max-turns: '3:2'"),
        (
            [*OPEN, "--burst-size", "4"],
            "--burst-size, --burst-every: with --pattern poisson; expected --pattern burst",
        ),
        ([*OPEN, "--steps", "4"], "--steps, --step-duration: with --pattern poisson; expected --pattern staircase"),
        ([*OPEN, "--spacing", "constant"], "--spacing: with --pattern poisson"),
        ([*OPEN, "--burstiness", "2"], "--burstiness: expected it with --pattern gamma"),
        ([*OPEN, "--pattern", "gamma"], "--burstiness: expected it with --pattern gamma"),
        (
            [*OPEN, "--pattern", "burst", "--burst-size", "1", "--burst-every", "1s"],
            "--rate: 1.0 with --pattern burst",
        ),
        (["--pattern", "burst", "--number", "1"], "--burst-size, --burst-every: missing"),
        (["--rate", "1:2", "--number", "1"], "--rate A:B: with --pattern poisson"),
        ([*OPEN, "--pattern", "ramp"], "--rate: no range; expected A:B with --pattern ramp"),
        (["--rate", "1:2", "--number", "1", "--pattern", "ramp"], "--duration: missing"),
        (["--rate", "1:2", "--pattern", "staircase"], "--steps, --step-duration: missing"),
        (
            ["--rate", "1:2", "--pattern", "staircase", "--steps", "2", "--step-duration", "1s", "--duration", "9s"],
            "--duration: 9.0 with --pattern staircase",
        ),
        (
            ["--rate", "1:2", "--pattern", "staircase", "--steps", "1", "--step-duration", "1s"],
            "--steps: 1; expected 2",
        ),
        (["--pattern", "series", "--number", "1"], "--rate-series: missing"),
        ([*OPEN, "--rate-between", "lines"], "--rate-between: with --pattern poisson; expected --pattern series"),
        ([*OPEN, "--turns", "2", "--tool-role", "tool"], "--tool-role: tool without --tool-latency"),
        ([*CLOSED, "--pattern", "constant"], "--rate: missing; expected arrivals a second with --pattern constant"),
        ([*CLOSED, "--dataset", "nosuch:f"], "--dataset: 'nosuch:f'; expected random, or NAME:PATH"),
        ([*CLOSED, "--dataset", "trie"], "--dataset: trie without a file; expected trie:PATH"),
        ([*CLOSED, "--dataset", f"trie:{__file__}", "--turns", "2"], "--turns: with a dataset's file"),
        ([*CLOSED, "--dataset", f"trie:{__file__}", "--dataset-offset=-1"], "--dataset-offset: -1"),
        ([*CLOSED, "--dataset", f"trie:{__file__}", "--first-turn-length", "9"], "--first-turn-length"),
        (
            [
                *CLOSED,
                "--dataset",
                f"sharegpt:{__file__}",
                "--api",
                "chat",
                "--prefix-count",
                "1",
                "--prefix-tokens",
                "9",
            ],
            "--prefix",
        ),
        ([*CLOSED, "--dataset", f"sharegpt:{__file__}"], "--api: completions with --dataset sharegpt"),
    ],
)
def test_bad_flags_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_config([*URL, *argv])
    assert message in str(error.value)


def test_turns_are_said_in_three_ways() -> None:
    assert parse_config([*URL, *OPEN, "--turns", "2:8"]).turns == LengthDistribution(2, 8)
    assert parse_config([*URL, *OPEN, "--min-turns", "2", "--max-turns", "8"]).turns == LengthDistribution(2, 8)
    assert parse_config([*URL, *OPEN, "--max-turns", "8"]).turns == LengthDistribution(1, 8)


@pytest.mark.parametrize(
    ("flags", "sessions", "requests"),
    [
        (["--parallel", "4"], 4, 4),
        (["--parallel-sessions", "4"], 4, 4),
        (["--parallel", "2", "--parallel-sessions", "4"], 4, 2),
        (["--rate", "1", "--parallel", "2"], None, 2),
        (["--rate", "1", "--parallel-sessions", "4"], 4, None),
        (["--rate", "1"], None, None),
    ],
)
def test_caps(flags: list[str], sessions: int | None, requests: int | None) -> None:
    config = parse_config([*URL, "--number", "9", *flags])
    assert (config.sessions_at_once, config.requests_at_once) == (sessions, requests)


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
@pytest.mark.parametrize(
    ("argv", "number", "parallel", "name"),
    [
        ([], 32, 4, "closed loop"),
        (["--parallel", "16"], 128, 16, "closed loop"),
        (["--parallel-sessions", "3", "--turns", "2"], 24, None, "closed loop"),
        (["--number", "5"], 5, 4, "closed loop"),
        (["--duration", "9s"], None, 4, "closed loop"),
        (["--pattern", "multiturn", "--turns", "3"], 32, 4, "closed loop"),
        (["--dataset", f"trie:{__file__}"], None, 4, "closed loop"),
        (["--rate", "2", "--number", "7"], 7, None, "poisson"),
        (["--pattern", "calibration"], None, 8, "calibration"),
    ],
)
def test_a_url_alone_is_a_small_closed_loop(
    argv: list[str], number: int | None, parallel: int | None, name: str
) -> None:
    config = parse_config([*URL[:2], *argv])
    assert (config.number, config.parallel, config.arrivals, config.seed) == (number, parallel, name, 0)
    assert config.trace == Path("loadgen.jsonl.zst")


@pytest.mark.parametrize(
    ("argv", "prefixes"),
    [([], 0), (["--prefix-tokens", "9"], 1), (["--prefix-tokens", "9", "--prefix-count", "3"], 3)],
)
def test_a_prefix_of_some_length_is_one_prefix(argv: list[str], prefixes: int) -> None:
    assert parse_config([*URL, *argv]).prefix_count == prefixes


def test_a_run_that_goes_on_names_its_trace() -> None:
    with pytest.raises(InputError, match="--resume: without --output; expected the trace to go on with"):
        parse_config([*URL[:2], "--resume"])


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
def test_the_line_of_another_projects_page_is_taken() -> None:
    config = parse_config(
        shlex.split(
            "--url http://127.0.0.1:8000 --model Qwen/Qwen3-8B --pattern multiturn --rate 1 --turns 5 "
            "--prefix-tokens 6500 --prompt-tokens 128 --output-tokens 128 --duration 120 --out run.json"
        )
    )
    assert config.duration_s == 120.0
    assert (config.prefix_count, config.trace, config.arrivals) == (1, Path("run.json"), "multiturn")


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
def test_an_endpoints_whole_url_is_taken() -> None:
    Path("F").touch()
    config = parse_config(
        shlex.split(
            "--model qwen-plus --url https://h/compatible-mode/v1/chat/completions --api chat --dataset trie:F "
            "--parallel 4 --number 10 --duration 600"
        )
    )
    assert config.duration_s == 600.0
    assert str(origin_of(config.url)) == "https://h/compatible-mode"
