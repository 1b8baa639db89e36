"""``sim sweep``: a grid read, forecast point by point, cut and gone on with, and the choice among its points."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report.pages.whatif import Span
from report.sweeps.grid import THROUGHPUT, GridPoint, GridSweep, headlines
from sim.__main__ import main
from sim.forecast.fleets import forecast_load
from sim.forecast.grid import read_grid
from sim.forecast.gridpoints import Frontier
from sim.forecast.scenarios import Scenario
from sim.forecast.whatif import WhatIfConfig, forecast_scenarios
from sim.latency.modelfile import default_model, save_model
from tests.jsonoutput import json_of
from tests.report.browser import CHROMIUM, figures_drawn
from tests.sim.forecast.conftest import interrupted_at
from tracefile import BlockHash, InputError, Meta, Record, RequestId, TraceWriter

pq = pytest.importorskip("pyarrow.parquet")

GRID = """
[sim.sweep]
gpu-price = 3.6
[base]
replicas = 2
[axes]
replicas = [1, 2, 3]
num-gpu-blocks = [101, 300]
"""


LIGHT = ["--members", "3", "--procs", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 requests over six prefixes of 28 blocks, in turn, five a second."""
    path = tmp_path_factory.mktemp("sweep")
    with TraceWriter(path / "shared.jsonl", Meta(block_size=32)) as writer:
        for number in range(60):
            shared = [BlockHash(number * number % 6 * 100 + block) for block in range(28)]
            own = [BlockHash(10_000 + number * 10 + block) for block in range(2)]
            writer.write(
                Record(
                    request_id=RequestId(f"s{number}"),
                    arrival_ms=number * 200.0,
                    e2e_ms=60.0,
                    prompt_tokens=960,
                    output_tokens=2,
                    block_hashes=[*shared, *own],
                )
            )
    save_model(default_model(), path / "model.json")
    (path / "grid.toml").write_text(GRID)
    return path


def swept(folder: Path, output: Path, *flags: str) -> list[str]:
    grid = str(folder / "grid.toml")
    model = ["--latency-model", str(folder / "model.json"), "--config", grid]
    return ["sweep", grid, str(folder / "shared.jsonl"), *model, *LIGHT, "-o", str(output), *flags]


def test_a_row_is_the_forecast_of_its_scenario(folder: Path, tmp_path: Path) -> None:
    """Today's row is that of ``sim what-if`` with its members; the cost is 3.6 an hour over the tokens of an hour."""
    found = json_of(main, swept(folder, tmp_path / "found.parquet", "--json"))
    table = pq.read_table(tmp_path / "found.parquet")
    assert table.column_names[:5] == [
        "cold_prompts",
        "rate",
        "num_gpu_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
    ]
    rows = table.to_pylist()
    assert [(row["replicas"], row["num_gpu_blocks"]) for row in rows] == [
        *((count, blocks) for count in (1, 2, 3) for blocks in (101, 300)),
        (2, default_model().engine.num_gpu_blocks),
    ]
    today = rows[-1]
    assert (today["today"], today["members"], today["gpus"]) == (True, 3, 2)
    base = Scenario({}, replicas=2)
    config = WhatIfConfig(folder / "shared.jsonl", folder / "model.json", (), base=base, members=3)
    row = forecast_scenarios(config)[0].rows[-1]
    for name, column in (("ttft.all.p90", "ttft_all_p90_ms"), ("hit_rate", "hit_rate"), ("itl.p50", "itl_p50_ms")):
        span = row.measures[name].value
        assert (span.low, span.middle, span.high) == (today[f"{column}_low"], today[column], today[f"{column}_high"])
    for row in rows:
        assert row["output_tokens_per_s_per_gpu"] == pytest.approx(row["output_tokens_per_s"] / row["gpus"], rel=1e-6)
        tokens_an_hour = 3600.0 * row["output_tokens_per_s_per_gpu"]
        assert row["cost_per_million_output_tokens"] == pytest.approx(3.6e6 / tokens_an_hour, rel=1e-4)
    # One engine keeps today's latency for half of the price, and with the smallest cache it does not.
    assert found["chosen"]["name"] == "num-gpu-blocks 300, 1 replica"
    assert found["slices"].keys() == {"replicas", "num-gpu-blocks"}


def test_without_an_slo_the_limit_is_todays_latency(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("[axes]\nmax-num-seqs = [1, 256]")
    given = [str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), *LIGHT]
    found = json_of(main, ["sweep", str(tmp_path / "grid.toml"), *given])
    assert found["chosen"]["name"] == found["today"]["name"] == ""
    assert headlines(msgspec.convert(found, GridSweep))[0].startswith("Change nothing: no point keeps today's latency")


def test_a_sweep_that_is_cut_goes_on_to_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(swept(folder, tmp_path / "whole.parquet")) == 0
    cut, journal = tmp_path / "cut.parquet", tmp_path / "cut.parquet.journal"
    with monkeypatch.context() as patch:
        patch.setattr("sim.forecast.sweep.running.forecast_load", interrupted_at(4, forecast_load))
        assert main(swept(folder, cut)) == 130
    assert f"interrupted; 3 forecasts are kept in {journal}; the same command goes on" in capsys.readouterr().err
    assert not cut.exists()
    with journal.open("ab") as file:  # a kill within a line
        file.write(b'["[{\\"cold')
    calls = itertools.count()
    monkeypatch.setattr(
        "sim.forecast.sweep.running.forecast_load", lambda *args, **more: (next(calls), forecast_load(*args, **more))[1]
    )
    assert main(swept(folder, cut)) == 0
    assert cut.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not journal.exists()
    refined = sum(row["members"] == 3 for row in pq.read_table(cut).to_pylist())
    assert next(calls) == 7 + refined - 3  # what was there is not computed again


@pytest.mark.ray
@pytest.mark.timeout(900)  # four workers that load the simulator, on two cores that something else may use
def test_one_core_two_cores_and_a_cluster_give_the_same_bytes(cluster: str, folder: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / f"{name}.parquet" for name in ("one", "two", "cluster")]
    for output, flags in zip(outputs, ([], ["--procs", "2"], ["--ray", cluster]), strict=True):
        command = [sys.executable, "-m", "sim", *swept(folder, output, *flags)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    first, *others = (output.read_bytes() for output in outputs)
    assert others == [first, first]


def test_a_journal_of_another_sweep_is_refused(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "o.parquet"
    (tmp_path / "o.parquet.journal").write_text(json.dumps({"schema": "kvtape-grid-journal/1", "trace": "x"}) + "\n")
    with pytest.raises(InputError, match=r"o\.parquet\.journal: of a cut sweep of another trace"):
        main(swept(folder, output))
    assert main(swept(folder, output, "--overwrite", "--refine", "1")) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[axes]\nreplica = [1]", "axes.replica: no such axis; expected some of cold-prompts, rate, num-gpu-blocks"),
        ("[axes]\nrate = [1, 2]\n[base]\ncache = 4", "base.cache: no such axis"),
        ("size = 4\n[axes]\nrate = [1]", "size: no such key; expected [axes], [base] or [sim.sweep]"),
        ("[axes]\nreplicas = ['4']", "axes.replicas: '4'; expected a whole number"),
        ("[axes]\nreplicas = [2.5]", "axes.replicas: 2.5; expected a whole number"),
        ("[axes]\nreplicas = [true]", "axes.replicas: True; expected a whole number"),
        ("[axes]\nreplicas = [0]", "axes.replicas: --replicas: 0; expected a whole number from 1"),
        ("[axes]\nreplicas = 4", "axes.replicas: 4; expected values in brackets"),
        ("[axes]\nreplicas = []", "axes.replicas: []; expected values in brackets"),
        ("[axes]\nrate = [1, 1.0]", "axes.rate: [1, 1.0]; expected each value once"),
        ("[axes]\nrate = [-1]", "axes.rate: '-1'; expected a number above 0"),
        ("[axes]\nroute = ['best']", "axes.route: "),
        ("[axes]\ndisk-latency = ['1ms', '2ms']", "--disk-latency: without --disk-blocks; expected both"),
        ("[axes]\ncold-prompts = [1]", "axes.cold-prompts: 1; expected true or false"),
        ("[axes]\nrate = {from = 2, to = 1, steps = 3}", "axes.rate: {'from': 2, 'to': 1, 'steps': 3}; expected 0 <"),
        ("[axes]\nroute = {from = 2, to = 1, steps = 3}", "axes.route: "),
        (
            "[axes]\nrate = {from = 1, to = 2, steps = 10000000}",
            "axes.rate: {'from': 1, 'to': 2, 'steps': 10000000}; expected 0 < from < to, and 2 to 100,000 steps",
        ),
        ('[axes]\nroute = ["evil.py:f"]', "axes.route: 'evil.py:f': code is run only from the command line"),
        ('[base]\nroute = "evil.py:pick"', "base.route: 'evil.py:pick': code is run only from the command line"),
        ("[axes]\nhost-gb-per-s = [25, 0]", "axes.host-gb-per-s: '0'; expected a number above 0"),
        ("[axes\n", "Expected ']' at the end of a table declaration (at line 1, column 6); expected TOML"),
        ("axes = 4", "axes: 4; expected a table [axes]"),
        ("", "axes: 1 points, all combinations; expected 2 to 100,000"),
        (
            f"[axes]\nmax-num-seqs = {list(range(1, 10_001))}\nmax-num-batched-tokens = {list(range(1, 1_001))}",
            "axes: 10,000,000 points, all combinations; expected 2 to 100,000",
        ),
    ],
)
def test_a_grid_that_means_nothing_is_refused_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_grid(path)
    assert str(refused.value).startswith(f"{path}: {said}")
    assert "\n" not in str(refused.value)


def test_a_setting_that_no_engine_has_names_grid_and_point(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("[axes]\nmax-num-seqs = [4, 0]")
    given = [str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json")]
    with pytest.raises(InputError, match=r"grid\.toml: max-num-seqs 0: max_num_seqs: 0 is too small"):
        main(["sweep", str(tmp_path / "grid.toml"), *given])


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (
            "[base]\nkv-bytes-per-token = 8\n[axes]\nhost-blocks = [40, 9]",
            r".*host-blocks 9, .*: --host-blocks: 9 blocks; expected 30 or more, as many as the longest prompt",
        ),
    ],
)
def test_a_point_that_cannot_be_planned_is_named_before_any_is_forecast(
    folder: Path, tmp_path: Path, grid: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.forecast.sweep.running.forecast_load", interrupted_at(1, forecast_load))
    (tmp_path / "grid.toml").write_text(grid.format(model=folder / "model.json"))
    given = [str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json")]
    with pytest.raises(InputError, match=rf"^[^\n]*grid\.toml: {said}[^\n]*$"):
        main(["sweep", str(tmp_path / "grid.toml"), *given])


def test_an_slo_on_requests_that_the_trace_lacks_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the trace has no requests of turns2\+; expected another cohort"):
        main(swept(folder, tmp_path / "o.parquet", "--slo", "turns2+.ttft.p90<=1s"))


def test_a_point_that_serves_nothing_meets_no_limit(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("[axes]\nnum-gpu-blocks = [3, 300]")
    given = [str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), *LIGHT]
    main(["sweep", str(tmp_path / "grid.toml"), *given, "--slo", "hit_rate>=0%", "--json"])
    rows = {row["num_gpu_blocks"]: row for row in pq.read_table(tmp_path / "grid.parquet").to_pylist()}
    assert (rows[3]["unserved"], rows[3]["meets"], rows[300]["meets"]) == (60.0, False, True)


def test_points_with_an_equal_forecast_are_refined_once(folder: Path, tmp_path: Path) -> None:
    """No step has as many requests or tokens, so that 12 points have 3 forecasts; they count once as near, too."""
    axes = "num-gpu-blocks = [101, 300, 301]\nmax-num-seqs = [32, 31]\nmax-num-batched-tokens = [2048, 2047]"
    (tmp_path / "grid.toml").write_text(f"[axes]\n{axes}")
    given = [str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), *LIGHT, "--json"]
    found = json_of(main, ["sweep", str(tmp_path / "grid.toml"), *given, "--slo", "ttft.p90<=1s"])
    rows = pq.read_table(tmp_path / "grid.parquet").to_pylist()
    refined = [row for row in rows if row["members"] == 3]
    assert len({row["num_gpu_blocks"] for row in refined}) == len(refined) == found["refined"]
    assert not any("have one member" in note for note in found["notes"])


def test_a_repeated_point_stands_in_no_set() -> None:
    points = [grid_point(100.0, 100.0), grid_point(100.0, 90.0), grid_point(200.0, 150.0)]
    assert front(points).choice(90.0) == 1
    some = Frontier(points, "ttft.all.p90", {1})
    assert (some.best(), some.near(), some.choice(90.0)) == ([0, 2], [0, 2], None)


def test_a_range_has_equal_ratios(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("[axes]\nrate = {from = 0.5, to = 8, steps = 5}\nreplicas = {from = 1, to = 3, steps = 9}")
    assert [*read_grid(path).axes.values()] == [[0.5, 1.0, 2.0, 4.0, 8.0], [1, 2, 3]]


def grid_point(throughput: float, latency: float, *, changes: int = 1, **more: Any) -> GridPoint:
    """A point of these two numbers."""
    told = {THROUGHPUT: throughput, "ttft.all.p90": latency, "unserved": 0.0}
    given: dict[str, Any] = {
        **{"name": "", "same_load": True, "settings": {}, "gpus": 1, "members": 1, "effects": {}, "within": None},
        **{"meets": True, "utilization": None, "saturated": False, "warnings": [], "changes": changes},
        "measures": {name: Span(middle=value, low=value, high=value) for name, value in told.items()},
    }
    return GridPoint(**given | more)


def front(points: Sequence[GridPoint]) -> Frontier:
    return Frontier(points, "ttft.all.p90")


def test_the_cheapest_point_within_the_limit_is_chosen_and_of_equal_ones_the_nearest_to_today() -> None:
    points = [
        grid_point(100.0, 800.0, changes=0),
        grid_point(200.0, 790.0, changes=2),
        grid_point(200.0, 791.0, changes=1),  # as fast within 2 %, with less to change
        grid_point(400.0, 950.0),
        grid_point(400.0, 500.0, meets=False),
        grid_point(400.0, 500.0, same_load=False),
        grid_point(400.0, 500.0, saturated=True),
    ]
    assert front(points).choice(800.0) == 2
    assert front(points).choice(None) == 3
    assert front(points).choice(400.0) is None
    assert front(points[:1]).choice(800.0) == 0
    # As cheap within 2 %, though 99.8 and 100 round to different steps; and no wait at all is the shortest.
    assert front([grid_point(99.8, 800.0), grid_point(100.0, 800.0, changes=3)]).choice(800.0) == 0
    assert front([grid_point(100.0, 5.0), grid_point(100.0, 0.0)]).choice(0.0) == 1


def test_the_knee_is_farthest_below_the_line_through_the_ends() -> None:
    points = [grid_point(x, y) for x, y in ((100.0, 100.0), (300.0, 110.0), (390.0, 200.0), (400.0, 900.0))]
    assert front(points).knee() == 1
    assert front(points[:2]).knee() is None


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=12))
def test_the_pareto_set_is_what_no_point_beats(numbers: list[tuple[int, int, int]]) -> None:
    """Every point compared with every other; of points equal in both numbers one with the fewest changes stays."""
    points = [grid_point(100.0 * x, 10.0 * y, changes=changes) for x, y, changes in numbers]

    def beaten(x: int, y: int) -> bool:
        return any(u >= x and v <= y and (u, v) != (x, y) for u, v, _ in numbers)

    expected = {(x, y): 9 for x, y, _ in numbers if not beaten(x, y)}
    for x, y, changes in numbers:
        if (x, y) in expected:
            expected[x, y] = min(expected[x, y], changes)
    best = front(points).best()
    assert {numbers[at][:2]: numbers[at][2] for at in best} == expected
    assert [numbers[at][0] for at in best] == sorted(numbers[at][0] for at in best)
    assert set(best) <= set(front(points).near())


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
def test_a_browser_draws_the_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(swept(folder, tmp_path / "o.parquet", "--html", str(page))) == 0
    ids = {f"{axis}-{measure}" for axis in ("replicas", "num-gpu-blocks") for measure in ("ttft-all-p90", "hit-rate")}
    assert figures_drawn(page) == {"frontier", *ids}
