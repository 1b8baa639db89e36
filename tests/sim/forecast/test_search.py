"""``sim search`` against every value tried, on loads small enough for it."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.__main__ import main
from sim.forecast.captured import plan, read_captured
from sim.forecast.ensemble import forecast, members
from sim.forecast.fleets import forecast_load
from sim.forecast.limits import parse_limit
from sim.forecast.points import ForecastConfig
from sim.forecast.results import ForecastGrid, ForecastPoint
from sim.forecast.scenarios import Scenario
from sim.forecast.search import Question, bisect, search
from sim.latency.modelfile import default_model, load_model, save_model
from tests.sim.forecast.conftest import interrupted_at, write_shared
from tracefile.records.errors import InputError

MEMBERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 requests on prefixes of 28 blocks, out of turn, three a second."""
    path = tmp_path_factory.mktemp("search")
    write_shared(path / "shared.jsonl", 120, 333.0, lambda number: number * number % 6)
    model = default_model()
    row = [parameter.value for parameter in model.parameters.values()]
    draws = [[value * share for value in row] for share in (0.94, 0.98, 1.0, 1.03)]
    save_model(msgspec.structs.replace(model, draws=draws), path / "model.json")
    return path


@pytest.fixture(autouse=True)
def lower_confidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of eight members decide."""
    monkeypatch.setattr("sim.forecast.points.CONFIDENCE", 0.75)


def tried(grid: ForecastGrid) -> dict[float, ForecastPoint]:
    """Points by value of the searched quantity."""
    return {float(point.settings[grid.axes[0]] or 0.0): point for point in grid.points}


def chosen_value(grid: ForecastGrid) -> float | None:
    return next((value for value, point in tried(grid).items() if "chosen" in point.marks), None)


def share(point: ForecastPoint) -> float:
    return point.middle("within") or 0.0


def searched(
    folder: Path,
    quantity: str,
    target: str,
    *,
    trace: str = "shared",
    model: str = "model",
    members: int = MEMBERS,
    **options: Any,
) -> ForecastGrid:
    config = ForecastConfig(trace=folder / f"{trace}.jsonl", model=folder / f"{model}.json", members=members)
    return search(config, Question(quantity=quantity, target=parse_limit("--target", target), **options))


def shares_within(folder: Path, scenarios: list[Scenario], rank: int, limit_ms: float) -> list[float]:
    """Of the members whose TTFT of this rank is within the limit, each scenario forecast by itself."""
    model = load_model(folder / "model.json")
    captured, drawn = read_captured(folder / "shared.jsonl", model), members(model, MEMBERS, 0)
    loads = [plan(captured, scenario) for scenario in scenarios]
    latencies_ms = [forecast(load.arrivals, load.engine, drawn, seed=0).ttft_ms for load in loads]
    return [float(np.mean(np.sort(ttft_ms, axis=1)[:, rank - 1] <= limit_ms)) for ttft_ms in latencies_ms]


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 500))
def test_bisection_finds_the_last_passing_value(first: int, second: int, last: int) -> None:
    """Counts that hold down to ``last``, from the large end; each count is tested once."""
    hard, easy = min(first, second), max(first, second) + 1
    tested: list[float] = []

    def holds(value: float) -> bool:
        tested.append(value)
        return value >= last

    expected = None if last > easy else float(max(last, hard))
    assert bisect(float(easy), float(hard), holds, 0.0, counts=True) == expected
    assert len(tested) == len(set(tested)) <= 2 + 2 * easy.bit_length()


def test_smallest_cache_equals_exhaustive_search(folder: Path) -> None:
    """To the block; the 60th of 120 is the median."""
    grid = searched(folder, "num-gpu-blocks", "ttft.p50<=24ms", between=(60.0, 100.0), tolerance=0.0)
    sizes = range(60, 101)
    shares = shares_within(folder, [Scenario({"num_gpu_blocks": blocks}) for blocks in sizes], 60, 24.0)
    by_size = dict(zip(sizes, shares, strict=True))
    assert grid.outcome == "found"
    assert chosen_value(grid) == 1 + max(blocks for blocks, share in by_size.items() if share < 0.75)
    values = tried(grid)
    assert {value: share(point) for value, point in values.items()} == {value: by_size[int(value)] for value in values}
    assert list(values) == sorted(values)


def test_unreachable_target_prints_the_best_value(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No cache makes the front end faster than its 7 ms and a step's 4.3."""
    argv = ["search", str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), "--members", "4"]
    assert main([*argv, "--minimize", "num-gpu-blocks", "--target", "ttft.p50<=9ms"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("Not reachable: ttft.p50<=9ms (all requests, n = 120) with ")
    assert "% confidence holds at no num-gpu-blocks" in output


def test_passing_end_is_the_result(folder: Path) -> None:
    grid = searched(folder, "rate", "ttft.p50<=1s", between=(0.5, 0.6), tolerance=0.05)
    assert (grid.outcome, chosen_value(grid)) == ("all hold", 0.6)
    assert "extend it with --between" in grid.headlines[0]
    assert all(0.5 <= value <= 0.6 for value in tried(grid))


def test_saturated_load_passes_no_target(folder: Path) -> None:
    """The limit is kept for as long as the capture lasts, and longer loads would break it."""
    grid = searched(folder, "rate", "ttft.p90<=5s", between=(1.0, 400.0), tolerance=0.1)
    assert grid.outcome == "found"
    assert chosen_value(grid) is not None
    assert all(point.meets is (share(point) >= 0.75 and not point.saturated) for point in grid.points)
    beyond = next(point for value, point in tried(grid).items() if value > (chosen_value(grid) or 0.0))
    assert beyond.saturated
    assert share(beyond) == 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "ttft.p90<=500"], "--target ttft.p90<=500: expected a duration"),
        (["--between", "2,1"], "--between: '2,1'; expected two values above 0, the smaller first"),
        (["--rate", "2"], "--rate: it is what is searched; expected --between to limit it"),
        (["--num-gpu-blocks", "100,200"], "2 scenarios; expected one value of each flag, as rate is varied"),
        (
            ["--target", "turns2+.ttft.p90<=80ms"],
            "--target turns2+.ttft.p90<=80ms: the trace has no requests of tu",
        ),
    ],
)
def test_invalid_flags_print_a_single_line(folder: Path, flags: list[str], message: str) -> None:
    argv = ["search", str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), "--maximize", "rate"]
    with pytest.raises(InputError) as refused:
        main([*argv, "--target", "ttft.p90<=80ms", *flags])
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["host-blocks", "--between", "3,64", "--kv-bytes-per-token", "8"],
            "--host-blocks: 3 blocks; expected 30 or more, as many as the longest prompt",
        ),
        (["host-blocks", "--between", "30,64"], "--kv-bytes-per-token: not set; expected the KV cache's bytes"),
    ],
)
def test_impossible_search_is_rejected_first(
    folder: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.forecast.points.forecast_load", interrupted_at(1, forecast_load))
    argv = ["search", str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), "--minimize", *flags]
    with pytest.raises(InputError) as refused:
        main([*argv, "--target", "ttft.p90<=80ms"])
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
