"""``--route``: settings in one word, and users' own policies."""

from pathlib import Path

import msgspec
import pytest

from engines.routing import (
    RoutedRequest,
    RoutingCosts,
    make_router,
    parse_route,
)
from sim.latency.modelfile import default_model
from tracefile import InputError, Record, RequestId, SessionId

NAMES = ["a", "b", "c"]


def request(number: int) -> RoutedRequest:
    return RoutedRequest(number, float(number), b"s", [1, 2, 3], 16, 50)


def test_settings_follow_the_name() -> None:
    route = parse_route("overlap:overlap-weight=2:lag=250ms:index-blocks=500")
    assert (route.settings.overlap_weight, route.lag_s, route.index_blocks) == (2.0, 0.25, 500)
    router = make_router(route, NAMES)
    router.sent(request(0), 1)
    router.ended(0, 0.1)
    assert router.choose(request(1)) == 1
    assert [engine.overlap for engine in router.engines] == [0, 3, 0]
    # No knowledge: the load alone decides, and engine 1 has some.
    blind = make_router(parse_route("overlap:knowledge=none"), NAMES)
    blind.sent(request(0), 1)
    assert blind.choose(request(1)) != 1


def test_a_model_and_a_trace_are_settings(tmp_path: Path) -> None:
    model, trace = tmp_path / "model.json", tmp_path / "trace.jsonl"
    model.write_bytes(msgspec.json.encode(default_model()))
    lines = [META] + [record(session, turn) for session in range(3) for turn in (1, 2)]
    trace.write_bytes(b"\n".join(lines) + b"\n")
    route = parse_route(f"workload:model={model}:trace={trace}")
    router = make_router(route, NAMES)
    assert [engine.costs.t0_ms for engine in router.engines] == [4.3, 4.3, 4.3]
    statistics = route.settings.statistics
    assert statistics is not None
    assert statistics.turns_seen == 6
    assert (statistics.another_turn(1) > 0.6, statistics.another_turn(2) < 0.4) == (True, True)
    # The priors weigh one: rests of 10 and three of 4 s, services of 2 and six of 1 s, growths of 500 and three of 900.
    assert statistics.rest_s.value == pytest.approx((10 + 3 * 4) / 4)
    assert statistics.service_s.value == pytest.approx((2 + 6) / 7)
    assert statistics.growth_tokens.value == pytest.approx((500 + 3 * 900) / 4)
    # Each router goes on from the trace alone.
    router.sent(request(0), 0)
    router.ended(0, 1.0)
    router.sent(request(1), 0)
    assert statistics.turns_seen == 6
    with pytest.raises(InputError, match=f"trace={model}: "):
        parse_route(f"workload:trace={model}")


def test_speeds_are_in_the_costs_once() -> None:
    own = [RoutingCosts(t0_ms=4.0), RoutingCosts(t0_ms=8.0)]
    router = make_router(parse_route("cost"), ["a", "b"], costs=own, speeds=[1.0, 0.5])
    assert [engine.costs.t0_ms for engine in router.engines] == [4.0, 8.0]
    router = make_router(parse_route("cost"), ["a", "b"], speeds=[1.0, 0.5])
    assert [engine.costs.per_prefill_token_ms for engine in router.engines] == [1.0, 2.0]


META = b'{"meta":{"schema":"kvtape/1","block_size":16}}'


def record(session: int, turn: int) -> bytes:
    made = Record(
        request_id=RequestId(f"{session}-{turn}"),
        session_id=SessionId(f"s{session}"),
        arrival_ms=turn * 5000.0,
        e2e_ms=1000.0,
        prompt_tokens=900 * turn,
        think_ms=4000.0 if turn > 1 else None,
    )
    return msgspec.json.encode(made)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("boundd", "--route boundd: unknown policy; expected one of round-robin, random"),
        (
            "bounded:factor=2",
            "--route bounded:factor=2: 'factor=2'; expected SETTING=VALUE, a setting of seed, load-factor",
        ),
        ("bounded:load-factor=0.5", "--route bounded:load-factor=0.5: load-factor=0.5; expected a number, 1 or more"),
        ("random:seed=x", "--route random:seed=x: seed=x; expected a whole number, 0 or more"),
        ("prefix:lag=3", "--route prefix:lag=3: lag='3' has no unit; expected 3s, 3ms, 3m or 3h"),
        (
            "prefix:knowledge=all",
            "--route prefix:knowledge=all: knowledge=all; expected one of complete, partial, none",
        ),
        (
            "nowhere.py:choose",
            "--route nowhere.py:choose: nowhere.py is no file; expected a Python file with a function",
        ),
        ("nowhere.py", "--route nowhere.py: names no function; expected nowhere.py:FUNCTION"),
    ],
)
def test_bad_routes_are_refused_in_one_line(text: str, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_route(text)
    assert str(refused.value).startswith(expected)
    assert "\n" not in str(refused.value)


def test_complete_knowledge_needs_caches_that_are_known() -> None:
    with pytest.raises(InputError, match="caches are not known here; expected knowledge=partial"):
        make_router(parse_route("prefix:knowledge=complete"), NAMES)


def written(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


def test_a_users_policy_chooses_with_settings(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "def choose(request, engines):\n    return max(range(len(engines)), key=lambda p: engines[p].overlap)\n",
    )
    router = make_router(parse_route(f"{path}:choose:lag=1s"), NAMES)
    router.sent(request(0), 2)
    assert router.choose(request(1)) == 2


@pytest.mark.parametrize(("value", "shown"), [("None", "None"), ("3", "3"), ("-1", "-1"), ("True", "True")])
def test_a_users_policy_that_returns_no_place_is_told(tmp_path: Path, value: str, shown: str) -> None:
    path = written(tmp_path, f"def choose(request, engines):\n    return {value}\n")
    router = make_router(parse_route(f"{path}:choose"), NAMES)
    with pytest.raises(InputError, match=f"mine.py:choose: returned {shown}; expected a place from 0 to 2"):
        router.choose(request(0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", "has no function choose"),
        ("raise ValueError('two\\nlines')", "cannot be loaded: ValueError at mine.py:1: two lines"),
        (
            "def choose(request):\n    return 0",
            ": too many positional arguments; expected a function of (request, engines)",
        ),
    ],
)
def test_a_file_without_a_policy_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_route(written(tmp_path, text) + ":choose")
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
