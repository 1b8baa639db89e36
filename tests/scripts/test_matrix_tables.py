"""The fidelity matrix's goals and tables, from verdicts written out by hand."""

from pathlib import Path

import msgspec
import pytest

from scripts.fidelity.goals import goals
from scripts.fidelity.judging import Cell, Errors, Quantile, Verdicts, with_cold_yardsticks
from scripts.fidelity.loads import Way
from scripts.fidelity.pace import Pace
from scripts.fidelity.tables import cells_table, decodes_table, insert, page


def quantile(captured_ms: float, forecast_ms: float, aa_error: float | None = None, *, held: bool = True) -> Quantile:
    error = (forecast_ms - captured_ms) / captured_ms
    return Quantile(
        captured_ms=captured_ms,
        forecast_ms=forecast_ms,
        error=error,
        low=error - 0.05,
        high=error + 0.05,
        inside_band=held,
        aa_error=aa_error,
        inside_aa=None if aa_error is None else abs(error) <= abs(aa_error),
    )


def cell(
    load: str, way: Way = "warm", *, saturated: bool = False, p50: float = 104.0, n: int = 120, pace: float = 1.04
) -> Cell:
    """Captured 100 / 200 / 400 ms; forecast ``p50`` / 230 / 500, the second no worse than A/A, the third outside."""
    return Cell(
        shape="128x2",
        load=load,
        way=way,
        cohort="turns2+",
        n=n,
        censored=6,
        cached_n=n,
        cached_exact=0.975,
        preemptions=0,
        offered=0.4,
        saturated=saturated,
        pace=Pace(steps=pace, decodes={"16+": 0.85}),
        quantiles={
            "p50": quantile(100.0, p50),
            "p90": quantile(200.0, 230.0, -0.2),
            "p99": quantile(400.0, 500.0, 0.1, held=False),
        },
        w1_ms=12.0,
        w1_aa_ms=9.0,
        baselines={"constant_ttft": Errors(p50=0.02, p90=0.5, p99=0.6, w1_ms=80.0)},
    )


def test_goals_say_what_was_found_and_where_they_are_missed() -> None:
    found = {
        goal.goal: (goal.found, goal.met, goal.missed_in)
        for goal in goals([cell("a"), cell("b", p50=103.0), cell("c", "uncached", saturated=True, p50=120.0, n=80)])
    }
    cells = ["128x2 a turns2+", "128x2 b turns2+"]
    cold = "128x2 c uncached turns2+"
    # Errors of 4 and 3 %: their median is 3.5 %, and the saturated cell is not among them.
    assert found["below saturation, median error of p50 ≤ 5%"] == (
        "3.5% over 2 cells; 2 within it or inside A/A",
        True,
        [],
    )
    # 15 % each, beyond the limit; A/A was off by 20 %, so neither is missed, but the median is.
    assert found["below saturation, median error of p90 ≤ 10%"] == (
        "15.0% over 2 cells; 2 within it or inside A/A",
        False,
        [],
    )
    assert found["below saturation, median error of p99 ≤ 15%"][1:] == (False, cells)
    assert found["in saturation, error of p50 ≤ 15%"] == ("0 of 1 cells", False, [cold])
    assert found["cached tokens exact for ≥ 99% of requests where nothing is preempted"] == (
        "312 of 320 (97.5%)",
        False,
        [*cells, cold],
    )
    assert found["90 % bands hold ≥ 85% of captured quantiles"] == (
        "6 of 9 (67%)",
        False,
        [f"{name} p99" for name in [*cells, cold]],
    )
    # The cell of 80 requests is too small for this one.
    assert found["closer than constant ttft by p50, n ≥ 100"] == ("0 of 2 cells", False, cells)
    assert found["closer than constant ttft by W1, n ≥ 100"] == ("2 of 2 cells", True, [])


def test_cells_whose_engine_kept_its_pace_are_also_told_alone() -> None:
    found = {goal.goal: goal.found for goal in goals([cell("a"), cell("b", p50=140.0, pace=0.7)])}
    assert found["below saturation, median error of p50 ≤ 5%"].startswith("22.0% over 2 cells")
    assert found["below saturation, steps within 10% of the model's, median error of p50 ≤ 5%"].startswith(
        "4.0% over 1 cell"
    )


def test_a_goal_without_a_cell_is_neither_met_nor_missed() -> None:
    (saturated,) = [goal for goal in goals([cell("a")]) if goal.goal.startswith("in saturation")]
    assert (saturated.found, saturated.met) == ("0 of 0 cells", None)


def test_two_ways_to_measure_a_cold_load_are_each_others_yardstick() -> None:
    faster = msgspec.structs.replace(cell("a", "uncached"), quantiles={"p50": quantile(100.0, 104.0)})
    slower = msgspec.structs.replace(cell("a", "cold-replayed"), quantiles={"p50": quantile(125.0, 90.0)})
    warm, *found = with_cold_yardsticks([cell("a"), faster, slower])
    assert warm == cell("a")
    # 4 % off where the other measurement is 25 % slower; 28 % off where it is 20 % faster.
    assert [(one.quantiles["p50"].aa_error, one.quantiles["p50"].inside_aa) for one in found] == [
        (0.25, True),
        (-0.2, False),
    ]


def test_a_row_a_cell() -> None:
    shown = cells_table([cell("session-fast", "uncached", saturated=True)]).splitlines()
    assert shown[2] == (
        "| session-fast turns2+ | 120 | 5% | 97.5% | 40% saturated | × 1.04 | 100 → 104, **+4.0%** (-1 … +9) ✓"
        " | 200 → 230, **+15.0%** (+10 … +20) ✓ | 400 → 500, **+25.0%** (+20 … +30) ✗ | 12 | – |"
    )


def test_decodes_are_told_by_their_answers_with_prefixes_shared_and_not() -> None:
    own = msgspec.structs.replace(cell("burst", "uncached"), pace=Pace(steps=1.0, decodes={"1–3": 1.1, "16+": 1.014}))
    replayed = cell("burst", "cold-replayed")
    shown = decodes_table([cell("burst"), own, replayed, cell("staircase")]).splitlines()
    assert shown[0] == "| load | 1–3, shared | 1–3, not | 4–15, shared | 4–15, not | 16+, shared | 16+, not |"
    assert shown[2:] == [
        "| burst | – | × 1.10 | – | – | × 0.85 | × 1.01 |",
        "| staircase | – | – | – | – | × 0.85 | – |",
    ]


def test_tables_take_the_place_of_the_old_ones_and_survive_json(tmp_path: Path) -> None:
    verdicts = Verdicts(cells=[cell("burst")], models={"128x2": {"t0_ms": "10 ms/step (9 … 11)"}})
    assert msgspec.json.decode(msgspec.json.encode(verdicts), type=Verdicts) == verdicts
    document = tmp_path / "results.md"
    document.write_text("before\n<!-- quiet: begin -->\nold\n<!-- quiet: end -->\nafter\n")
    insert(document, "quiet", page(verdicts))
    text = document.read_text()
    assert text.startswith("before\n<!-- quiet: begin -->\n\n| goal |")
    assert text.endswith("\n\n<!-- quiet: end -->\nafter\n")
    assert "**128x2. Warm" in text
    assert "| t0_ms | 10 ms/step (9 … 11) |" in text
    with pytest.raises(SystemExit, match="expected the lines <!-- busy: begin -->"):
        insert(document, "busy", "x")
