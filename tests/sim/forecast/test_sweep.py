"""``sim sweep``: a grid read, forecast point by point, and the choice among its points."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report.grid.points import LATENCY, PER_GPU, Measure, Span
from sim.__main__ import main
from sim.forecast.fleets import forecast_load
from sim.forecast.grid import read_grid
from sim.forecast.points import ForecastConfig
from sim.forecast.results import ForecastPoint
from sim.forecast.scenarios import Scenario
from sim.forecast.sweep import choice_of, pareto_of
from sim.forecast.whatif import WhatIf, forecast_scenarios
from sim.latency.modelfile import default_model, save_model
from tests.jsonoutput import json_of
from tests.sim.forecast.conftest import interrupted_at, write_shared
from tracefile.records.errors import InputError

GRID = """
[sim.sweep]
gpu-price = 3.6
procs = 1
[base]
replicas = 2
[axes]
replicas = [1, 2, 3]
num-gpu-blocks = [101, 300]
"""


LIGHT = ["--members", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 requests on prefixes of 28 blocks, out of turn, five a second."""
    path = tmp_path_factory.mktemp("sweep")
    write_shared(path / "shared.jsonl", 60, 200.0, lambda number: number * number % 6)
    save_model(default_model(), path / "model.json")
    (path / "grid.toml").write_text(GRID)
    return path


def swept(folder: Path, *flags: str) -> list[str]:
    grid = str(folder / "grid.toml")
    model = ["--latency-model", str(folder / "model.json"), "--config", grid]
    return ["sweep", grid, str(folder / "shared.jsonl"), *model, *LIGHT, *flags]


def test_row_equals_the_scenarios_forecast(folder: Path, tmp_path: Path) -> None:
    """The base row equals ``sim what-if`` of the same members; the cost is 3.6 an hour over the tokens of an hour."""
    result = json_of(main, swept(folder))
    points = result["points"]
    assert [(point["settings"]["replicas"], point["settings"]["num-gpu-blocks"]) for point in points] == [
        *((count, blocks) for count in (1, 2, 3) for blocks in (101, 300)),
        (2, default_model().engine.num_gpu_blocks),
    ]
    today = points[-1]
    assert (today["marks"][0], today["members"], today["gpus"]) == ("today", 3, 2)
    config = ForecastConfig(trace=folder / "shared.jsonl", model=folder / "model.json", members=3)
    row = forecast_scenarios(config, WhatIf(base=Scenario({}, replicas=2))).points[-1]
    for name in ("ttft.all.p90", "hit_rate", "itl.p50"):
        assert today["measures"][name]["value"] == msgspec.to_builtins(row.measures[name].value)
    for point in points:
        value = {name: measure["value"]["middle"] for name, measure in point["measures"].items()}
        per_gpu = value["output_tokens_per_s_per_gpu"]
        assert per_gpu == pytest.approx(value["output_tokens_per_s"] / point["gpus"], rel=1e-6)
        assert value["cost_per_million_output_tokens"] == pytest.approx(3.6e6 / (3600.0 * per_gpu), rel=1e-4)
    # One engine keeps today's latency for half of the price, and with the smallest cache it does not.
    assert [point["name"] for point in points if "chosen" in point["marks"]] == ["num-gpu-blocks 300, 1 replica"]
    assert result["axes"] == ["replicas", "num-gpu-blocks"]


def test_two_processes_give_the_same_points(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "two.toml"
    config.write_text("[sim.sweep]\ngpu-price = 3.6\nprocs = 2")
    assert json_of(main, swept(folder)) == json_of(main, [*swept(folder), "--config", str(config)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[axes]\nreplica = [1]", "axes.replica: no such axis; expected some of cold-prompts, rate, num-gpu-blocks"),
        ("size = 4\n[axes]\nrate = [1]", "size: no such table; expected [axes], [base] or [sim.sweep]"),
        ("[axes]\nreplicas = [0]", "axes.replicas: --replicas: 0; expected a whole number from 1"),
        ("[axes]\nreplicas = 4", "axes.replicas: 4; expected values in brackets"),
        ("[axes]\nrate = [1, 1.0]", "axes.rate: [1, 1.0]; expected each value once"),
        ("[axes]\nrate = [-1]", "axes.rate: '-1'; expected a number above 0"),
        ("[axes]\nhost-latency = ['1ms', '2ms']", "--host-latency: without --host-blocks; expected both"),
        ("[axes]\ncold-prompts = [1]", "axes.cold-prompts: 1; expected true or false"),
        (
            '[axes]\nroute = ["evil.py:f"]',
            "axes.route: 'evil.py:f': a policy file is accepted only by --route on the command line",
        ),
        ("[axes\n", "Expected ']' at the end of a table declaration (at line 1, column 6); expected TOML"),
        (
            f"[axes]\nmax-num-seqs = {list(range(1, 10_001))}\nmax-num-batched-tokens = {list(range(1, 1_001))}",
            "axes: 10,000,000 points, all combinations; expected 2 to 5,000",
        ),
    ],
)
def test_invalid_grid_prints_a_single_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_grid(path)
    assert str(refused.value).startswith(f"{path}: {message}")
    assert "\n" not in str(refused.value)


def test_impossible_point_is_rejected_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.forecast.points.forecast_load", interrupted_at(1, forecast_load))
    (tmp_path / "grid.toml").write_text("[base]\nkv-bytes-per-token = 8\n[axes]\nhost-blocks = [40, 9]")
    given = [str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json")]
    with pytest.raises(InputError, match=r"grid\.toml: .*host-blocks 9, .*: --host-blocks: 9 blocks; expected 30"):
        main(["sweep", str(tmp_path / "grid.toml"), *given])


def test_point_without_served_requests_meets_no_limit(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("[axes]\nnum-gpu-blocks = [3, 300]")
    given = [str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), *LIGHT]
    result = json_of(main, ["sweep", str(tmp_path / "grid.toml"), *given, "--slo", "hit_rate>=0%"])
    none, all_served, *_ = result["points"]
    assert (none["measures"]["unserved"]["value"]["middle"], none["meets"], all_served["meets"]) == (60.0, False, True)


def grid_point(throughput: float, latency: float, *, changes: int = 1, **more: Any) -> ForecastPoint:
    """A point of these two numbers."""
    values = {PER_GPU: throughput, LATENCY: latency, "unserved": 0.0}
    measures = {name: Measure(value=Span(middle=value)) for name, value in values.items()}
    given: dict[str, Any] = {"name": "", "settings": {}, "members": 1, "meets": True}
    return ForecastPoint(**given | {"measures": measures, "changes": changes} | more)


def choice(points: Sequence[ForecastPoint], limit_ms: float | None) -> int | None:
    index = choice_of({str(at): point for at, point in enumerate(points)}, LATENCY, limit_ms)
    return None if index is None else int(index)


def test_cheapest_passing_point_is_chosen() -> None:
    points = [
        grid_point(100.0, 800.0, changes=0),
        grid_point(200.0, 790.0, changes=2),
        grid_point(200.0, 791.0, changes=1),  # as fast within 2 %, with less to change
        grid_point(400.0, 950.0),
        grid_point(400.0, 500.0, meets=False),
        grid_point(400.0, 500.0, same_load=False),
        grid_point(400.0, 500.0, marks=["saturated"]),
    ]
    assert choice(points, 800.0) == 2
    assert choice(points, None) == 3
    assert choice(points, 400.0) is None
    assert choice(points[:1], 800.0) == 0
    # As cheap within 2 %, though 99.8 and 100 round to different steps; and no wait at all is the shortest.
    assert choice([grid_point(99.8, 800.0), grid_point(100.0, 800.0, changes=3)], 800.0) == 0
    assert choice([grid_point(100.0, 5.0), grid_point(100.0, 0.0)], 0.0) == 1


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=12))
def test_pareto_set_is_not_dominated(numbers: list[tuple[int, int, int]]) -> None:
    """All pairs of points compared; of points equal in both numbers a point with the fewest changes stays."""
    points = {str(at): grid_point(100.0 * x, 10.0 * y, changes=n) for at, (x, y, n) in enumerate(numbers)}

    def beaten(x: int, y: int) -> bool:
        return any(u >= x and v <= y and (u, v) != (x, y) for u, v, _ in numbers)

    expected = {(x, y): 9 for x, y, _ in numbers if not beaten(x, y)}
    for x, y, changes in numbers:
        if (x, y) in expected:
            expected[x, y] = min(expected[x, y], changes)
    best = [int(key) for key in pareto_of(points, LATENCY)]
    assert {numbers[at][:2]: numbers[at][2] for at in best} == expected
    assert [numbers[at][0] for at in best] == sorted(numbers[at][0] for at in best)
