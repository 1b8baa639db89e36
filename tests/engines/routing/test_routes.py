"""``--route``: settings, and policies of a user's file."""

from pathlib import Path

import msgspec
import pytest

from engines.routing import (
    RoutedRequest,
    make_router,
    parse_route,
)
from sim.latency.modelfile import default_model
from tracefile.records.errors import InputError

NAMES = ["a", "b", "c"]


def request(number: int) -> RoutedRequest:
    return RoutedRequest(number, float(number), b"s", [1, 2, 3], 16, 50)


def test_settings_follow_the_name(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_bytes(msgspec.json.encode(default_model()))
    route = parse_route(f"cost:lag=250ms:index-blocks=500:model={model}")
    assert (route.lag_s, route.index_blocks) == (0.25, 500)
    router = make_router(route, NAMES)
    assert [engine.costs.t0_ms for engine in router.engines] == [4.3, 4.3, 4.3]
    router.sent(request(0), 1)
    router.ended(0, 0.1)
    assert router.choose(request(1)) == 1
    assert [engine.overlap for engine in router.engines] == [0, 3, 0]
    blind = make_router(parse_route("cost:knowledge=none"), NAMES)
    blind.sent(request(0), 1)
    assert blind.choose(request(1)) != 1, "the load alone decides"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefx", "--route prefx: unknown policy; expected one of round-robin, least-loaded"),
        ("cost:factor=2", "--route cost:factor=2: 'factor=2'; expected SETTING=VALUE, a setting of knowledge, "),
        ("nowhere.py:choose", "--route nowhere.py:choose: expected FILE.py:FUNCTION, a function of"),
    ],
)
def test_invalid_routes_are_refused_in_one_line(text: str, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_route(text)
    assert str(refused.value).startswith(expected)
    assert "\n" not in str(refused.value)


def written(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


def test_user_policy_with_settings(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "def choose(request, engines):\n    return max(range(len(engines)), key=lambda p: engines[p].overlap)\n",
    )
    router = make_router(parse_route(f"{path}:choose:lag=1s"), NAMES)
    router.sent(request(0), 2)
    assert router.choose(request(1)) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", "has no attribute 'choose'"),
        ("raise ValueError('two\\nlines')", "ValueError at mine.py:1: two lines"),
        (
            "def choose(request):\n    return 0",
            ": too many positional arguments; expected a function of (request, engines)",
        ),
    ],
)
def test_file_without_a_policy_is_rejected(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_route(written(tmp_path, text) + ":choose")
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
