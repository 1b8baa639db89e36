"""The load as drawn: bounds, shapes, and a digest that tells two loads apart."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from loadgen.core.draws import Stream, below, draw
from loadgen.core.job import Shard, add_shares
from loadgen.core.lengths import LengthDistribution
from loadgen.core.request import origin_of
from loadgen.loadflags import parse_config
from loadgen.plan.config import LoadConfig
from loadgen.plan.loadjob import load_name
from loadgen.plan.workload import Workload
from tracefile.records.errors import InputError

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


@pytest.mark.parametrize("pattern", ["multiturn", "calibration"])
def test_nonce_changes_tokens_only(pattern: str) -> None:
    config = SESSIONS
    if pattern == "calibration":
        prompts = LengthDistribution(64, 10_000)
        config = LoadConfig(url="http://x", trace=Path("t"), pattern="calibration", parallel=4, prompt_tokens=prompts)
    first, second = (list(Workload(replace(config, nonce=nonce))) for nonce in (None, "7"))
    assert [(each.due_ms, each.prefix) for each in first] == [(each.due_ms, each.prefix) for each in second]
    assert not {each.prefix_key for each in first} & {each.prefix_key for each in second}
    turns, other_turns = ([turn for each in sessions for turn in each.turns] for sessions in (first, second))
    assert not {turn.prompt_key for turn in turns} & {turn.prompt_key for turn in other_turns}
    without_key = [replace_struct(turn, prompt_key=0) for turn in turns]
    assert without_key == [replace_struct(turn, prompt_key=0) for turn in other_turns]
    assert load_name(config) == load_name(replace(config, nonce="7"))  # requests keep their ids


def test_digest_is_reproducible() -> None:
    assert digest(SESSIONS) == "05f3206a60cb2914ab13a3696e2498e930c0dfe4cac3cbf8349eb830d665a781"


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"turns": LengthDistribution(2, 2)},
        {"prefix_tokens": 101},
        {"api": "chat"},
        {"rate": None, "parallel": 4},
        {"pattern": "constant"},
    ],
)
def test_another_load_has_another_digest(other: dict[str, object]) -> None:
    assert digest(replace(SESSIONS, **other)) != digest(SESSIONS)  # type: ignore[arg-type]


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 3000), st.booleans())
def test_shards_add_up_for_any_count(shards: int, number: int, closed: bool) -> None:
    config = replace(SESSIONS, number=number, turns=LengthDistribution(1, 2), rate=None if closed else 2.0, parallel=9)
    parts = [list(Workload(config, Shard(index, shards))) for index in range(shards)]
    unsharded = list(Workload(config))
    assert sorted((session for part in parts for session in part), key=lambda session: session.index) == unsharded
    for index, part in enumerate(parts):
        assert [session.index % shards for session in part] == [index] * len(part)
    assert digest(config, shards) == digest(config)
    planned = [Workload(config, Shard(index, shards)).survey().planned or 0 for index in range(shards)]
    assert sum(planned) == sum(len(session.turns) for session in unsharded)


def test_rate_series_ends_with_the_last_point_without_a_bound() -> None:
    series = replace(BASE, pattern="series", rate=None, number=None, rate_series=((0, 2), (10, 4)))
    assert series.ends_s == 10
    assert (replace(series, duration_s=20.0).ends_s, replace(series, number=100).ends_s) == (20, None)
    assert all((session.due_ms or 0.0) < 10_000 for session in Workload(series))
    assert len(list(Workload(replace(series, number=100)))) == 100


URL = ["--url", "http://127.0.0.1:1", "-o", "t.jsonl"]


CLOSED = ["--parallel", "1", "--number", "1"]
OPEN = ["--rate", "1", "--number", "1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "1"], "--duration, --number: both missing"),
        (["--rate", "1e300", "--number", "1"], "--rate: 1e+300; expected at most 1,000,000 a second"),
        ([*OPEN, "--prompt-tokens", "9:3"], "--prompt-tokens: '9:3'"),
        ([*OPEN, "--prefix-count", "2"], "2 prefixes of 0 tokens"),
        (["--pattern", "series", "--number", "1"], "--rate-series: expected it with --pattern series"),
    ],
)
def test_bad_flags_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_config([*URL, *argv])
    assert message in str(error.value)


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
@pytest.mark.parametrize(
    ("argv", "number", "parallel", "name"),
    [
        ([], 32, 4, "closed loop"),
        (["--parallel", "16"], 128, 16, "closed loop"),
        (["--duration", "9s"], None, 4, "closed loop"),
        (["--rate", "2", "--number", "7"], 7, None, "poisson"),
        (["--pattern", "calibration"], None, 8, "calibration"),
    ],
)
def test_default_load_is_a_small_closed_loop(
    argv: list[str], number: int | None, parallel: int | None, name: str
) -> None:
    config = parse_config([*URL[:2], *argv])
    assert (config.number, config.parallel, config.arrivals, config.seed) == (number, parallel, name, 0)
    assert config.trace == Path("loadgen.jsonl.zst")


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
def test_endpoint_url_is_accepted() -> None:
    Path("F").touch()
    config = parse_config(
        shlex.split(
            "--model qwen-plus --url https://h/compatible-mode/v1/chat/completions --api chat --dataset trace:F "
            "--parallel 4 --number 10 --duration 600"
        )
    )
    assert config.duration_s == 600.0
    assert str(origin_of(config.url)) == "https://h/compatible-mode"


def test_sessions_equal_single_draws() -> None:
    for session in Workload(SESSIONS):
        assert session.prefix == below(draw(1, Stream.PREFIX_CHOICE, session.index), 2)
        assert session.prefix_key == draw(1, Stream.PREFIX_TOKENS, session.prefix or 0)
        for number, turn in enumerate(session.turns):
            assert turn.prompt_key == draw(1, Stream.PROMPT_TOKENS, session.index, number)
            assert turn.prompt_tokens == 10 + below(draw(1, Stream.PROMPT_LENGTH, session.index, number), 11)
