"""``sim what-if``: rows beside the capture, effects member by member, saturation, horizons, and the printed text."""

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from measure.survival import CENSORED, EVENT, FAILED, LatencySample
from report.grid.points import effect_text, value_text
from report.output import render_page
from report.pages.panels import page_lines
from sim.__main__ import main
from sim.forecast.ensemble import Forecast, forecast, members
from sim.forecast.fleets import forecast_load
from sim.forecast.limits import evaluate, parse_limit, ttft
from sim.forecast.points import ForecastConfig
from sim.forecast.results import ForecastGrid, ForecastPoint
from sim.forecast.scenarios import Scenario, parse_base
from sim.forecast.summary import cohorts_of, ttft_sample
from sim.forecast.whatif import WhatIf, forecast_scenarios, headline, what_if_page
from sim.latency.modelfile import Model, Parameter, default_model, save_model
from sim.workload.arrivals import plan_arrivals
from tests.report.browser import CHROMIUM, figures_drawn, page_figures
from tests.sim.forecast.conftest import interrupted_at, write_shared
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

MEMBERS = 9


def model() -> Model:
    return msgspec.structs.replace(default_model(), drift_log_sd=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, synthetic: ModuleType) -> Path:
    """A trace of two-turn sessions and single prompts, one of a line that never ends, one of five prefixes in turn, and
    the model."""
    path = tmp_path_factory.mktemp("whatif")
    sessions = synthetic.calibration(seed=1, prompts=8, mixed=40)
    rush = [
        Record(
            request_id=RequestId(f"r{number}"),
            arrival_ms=number * 20.0,
            e2e_ms=30.0,
            prompt_tokens=2_000,
            output_tokens=2,
            block_hashes=[BlockHash(number * 1_000 + block) for block in range(62)],
        )
        for number in range(120)
    ]
    write_shared(path / "shared.jsonl", 40, 400.0)
    captured = synthetic.capture(synthetic.calibration(seed=3, prompts=8, mixed=40), model(), seed=5)
    for name, records in (("sessions", sessions), ("rush", rush), ("captured", captured)):
        with TraceWriter(path / f"{name}.jsonl", Meta(block_size=32)) as writer:
            for record in records:
                writer.write(record)
    save_model(model(), path / "model.json")
    return path


def config_of(folder: Path, trace: str, model: str = "model.json", **more: Any) -> ForecastConfig:
    return ForecastConfig(trace=folder / f"{trace}.jsonl", model=folder / model, **more)


def forecast_rows(folder: Path, *scenarios: Scenario, trace: str = "sessions") -> ForecastGrid:
    config = config_of(folder, trace, members=MEMBERS)
    return forecast_scenarios(config, WhatIf(scenarios=scenarios))


def describe(result: ForecastGrid) -> str:
    return "\n".join(page_lines(what_if_page(result)))


def rendered(result: ForecastGrid) -> str:
    return render_page(what_if_page(result))


def middle(row: ForecastPoint, name: str) -> float:
    value = row.measures[name].value.middle
    assert value is not None
    return value


def test_first_rows_are_measured_and_forecast(folder: Path) -> None:
    """A forecast never poses as a measurement: its error against the measured numbers is in the row."""
    result = forecast_rows(folder, Scenario({}, cold_prompts=True), trace="captured")
    assert [(row.kind, row.name) for row in result.points] == [
        ("measured", "measured"),
        ("capture", "forecast of the capture"),
        ("scenario", "cold prompts"),
    ]
    measured, capture, cold = result.points
    _, records = load_trace(folder / "captured.jsonl")
    ttfts_ms = sorted(record.ttft_ms or 0.0 for record in records)
    assert middle(measured, "ttft.all.p50") == pytest.approx(ttfts_ms[len(ttfts_ms) // 2 - 1], abs=1e-6)
    gaps_ms = sorted(gap_ms for record in records for gap_ms in record.itl_ms)
    assert middle(measured, "itl.p90") == pytest.approx(gaps_ms[math.ceil(0.9 * len(gaps_ms)) - 1], abs=1e-6)
    cached = sum(record.cached_tokens or 0 for record in records)
    prompts = sum(record.prompt_tokens or 0 for record in records)
    assert middle(measured, "hit_rate") == pytest.approx(cached / prompts, abs=1e-6)
    expected = middle(capture, "ttft.all.p90") / middle(measured, "ttft.all.p90")
    ratio = capture.measures["ttft.all.p90"].ratio
    assert ratio is not None
    assert ratio.middle == pytest.approx(expected, abs=1e-5)
    assert all(measure.difference is None for measure in capture.measures.values())
    assert cold.measures["ttft.all.p90"].difference is not None
    text = describe(result)
    assert text.index("\nmeasured ") < text.index("\nforecast of the capture ")
    assert re.fullmatch(
        "the latency model was never validated: .*; forecast of this capture: TTFT of all requests is off by .*, "
        r"within the gates' limits, but with a band of ± \d\d\.\d % at p\d\d: too uncertain to say",
        result.verdicts[0],
    )
    assert "measured" in rendered(result)


def test_scenarios_are_paired(folder: Path) -> None:
    """Effects are against ``--base``: the same rate and pool but for the setting that differs."""
    base = parse_base("rate=0.5, num-gpu-blocks=400")
    question = WhatIf(scenarios=(Scenario({"num_gpu_blocks": 64}, 0.5),), base=base)
    result = forecast_scenarios(config_of(folder, "shared", members=2), question)
    assert [(row.kind, row.name) for row in result.points] == [
        ("base", "base: rate ×0.5, num-gpu-blocks 400"),
        ("scenario", "num-gpu-blocks 64"),
    ]
    assert result.points[0].settings == {"num_gpu_blocks": 400}
    lost = result.points[1].measures["hit_rate"].difference
    assert lost is not None
    assert lost.middle == pytest.approx(-35 * 28 / (40 * 30), abs=1e-6)


def test_effect_is_paired_by_member(folder: Path) -> None:
    """A pool twice as large that never was full changes nothing, in no member, however far the members are apart."""
    row = forecast_rows(folder, Scenario({"num_gpu_blocks": 8_192})).points[1]
    ttft = row.measures["ttft.all.p50"]
    assert ttft.value.low is not None
    assert ttft.value.high is not None
    assert ttft.value.high > 1.2 * ttft.value.low
    assert ttft.difference is not None
    assert (ttft.difference.low, ttft.difference.middle, ttft.difference.high) == (0.0, 0.0, 0.0)
    assert ttft.ratio is not None
    assert (ttft.ratio.low, ttft.ratio.high) == (1.0, 1.0)


def test_numbers_equal_the_forecasts(folder: Path, synthetic: ModuleType) -> None:
    """Worked out again from the members, request by request."""
    row = forecast_rows(folder, Scenario({}, cold_prompts=True)).points[1]
    records = synthetic.calibration(seed=1, prompts=8, mixed=40)
    config, drawn = default_model().engine, members(model(), MEMBERS, 0)
    pair = [
        forecast(
            plan_arrivals(Meta(block_size=32), records, 32, replay_sessions=True, cold_prompts=cold), config, drawn
        )
        for cold in (False, True)
    ]
    later = cohorts_of(records)["turns2+"]
    assert [records[position].turn for position in later] == [2] * 8

    def p90(sample: Forecast) -> list[float]:
        """The 8th of 8: the smallest by which nine tenths had it."""
        return [sorted(sample.ttft_ms[member, later])[7] for member in range(MEMBERS)]

    warm, cold = (np.array(p90(sample)) for sample in pair)
    measure = row.measures["ttft.turns2+.p90"]
    assert measure.value.middle == pytest.approx(sorted(cold)[4], abs=1e-6)
    assert measure.value.high == pytest.approx(max(cold), abs=1e-6)
    assert measure.difference is not None
    assert measure.difference.middle == pytest.approx(sorted(cold - warm)[4], abs=1e-6)
    assert measure.difference.low == pytest.approx(min(cold - warm), abs=1e-6)
    assert measure.ratio is not None
    assert measure.ratio.middle == pytest.approx(sorted(cold / warm)[4], abs=1e-6)
    tokens = sum(record.output_tokens or 0 for record in records)
    seconds = [np.nanmax((pair[1].arrival_ms + pair[1].e2e_ms)[member]) / 1e3 for member in range(MEMBERS)]
    assert middle(row, "output_tokens_per_s") == pytest.approx(sorted(tokens / np.array(seconds))[4], abs=1e-5)


def test_saturated_load_is_marked_and_meets_no_limit(folder: Path) -> None:
    """120 prompts come, one every 20 ms, and each needs some 50."""
    measured, row, slow = forecast_rows(folder, Scenario({}, rate=0.1), trace="rush").points
    assert (measured.kind, measured.measures["e2e.p50"].value.middle, measured.curves) == ("measured", 30.0, {})
    assert row.saturated
    assert middle(row, "utilization") > 2.0
    assert not slow.saturated
    gates = [parse_limit("--gate", text) for text in ("ttft.p50<=1m", "hit_rate>=0")]
    saturated = msgspec.structs.replace(row, kind="scenario")
    assert [gate.passed for gate in evaluate(gates, [slow, saturated])] == [True, True, False, True]


def test_missing_latency_is_no_value(folder: Path) -> None:
    """A client that gave up is censored where it did; a request longer than the engine failed."""
    records = [
        Record(
            request_id=RequestId("gone"), arrival_ms=0.0, prompt_tokens=9_000, output_tokens=0, max_tokens=5,
            status="client_abort", e2e_ms=11.0,
        ),
        Record(request_id=RequestId("long"), arrival_ms=0.0, prompt_tokens=90_000, output_tokens=5),
        Record(request_id=RequestId("fine"), arrival_ms=900.0, prompt_tokens=90, output_tokens=5),
    ]  # fmt: skip
    arrivals = plan_arrivals(Meta(block_size=32), records, 32, needs_hashes=False)
    ensemble = forecast(arrivals, default_model().engine, [default_model()], seed=None)
    waits = ttft_sample(ensemble, 0, np.arange(3))
    fine_ms = float(ensemble.ttft_ms[0, 2])
    assert ends(waits) == {0: (11.0, CENSORED), 1: (float(ensemble.e2e_ms[0, 1]), FAILED), 2: (fine_ms, EVENT)}


def ends(waits: LatencySample) -> dict[int, tuple[float, int]]:
    """How long each request waited, and how that ended."""
    rows, times_ms = waits.row.tolist(), waits.time_ms.tolist()
    return {row: (time_ms, end) for row, time_ms, end in zip(rows, times_ms, waits.end.tolist(), strict=True)}


def test_extrapolation_gives_a_warning(folder: Path) -> None:
    open_model = model()
    b = open_model.parameters["per_attention_token2_ms"]
    parameters = {
        **open_model.parameters,
        "per_attention_token2_ms": Parameter(value=0.0, unit=b.unit, high=1e-4, identified=False, note="anything"),
    }
    save_model(msgspec.structs.replace(open_model, parameters=parameters), folder / "open.json")
    question = WhatIf(scenarios=(Scenario({"block_size": 64, "max_num_batched_tokens": 4_096}),))
    captured, larger = forecast_scenarios(config_of(folder, "shared", "open.json", members=2), question).points
    assert any("per_attention_token2_ms is not identified (anything)" in warning for warning in captured.warnings)
    assert "block_size 64, fitted under 32" in larger.warnings
    assert "max_num_batched_tokens 4096, fitted under 2048" in larger.warnings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--members", "1"], "--members: 1; expected 2 or more"),
        (["--rate", "-1"], "--rate: '-1'; expected a number above 0"),
        (["--num-gpu-blocks", "9000,3"], "num-gpu-blocks 3: 3 blocks hold no request; expected more --num-gpu-blocks"),
        (["--host-blocks", "9", "--kv-bytes-per-token", "8"], "host-blocks 9, kv-bytes-per-token 8: --host-blocks: 9 "),
        (["--block-size", "48"], "block size 48: not a multiple of the trace's 32"),
    ],
)
def test_invalid_flags_print_a_single_line_before_forecasting(
    folder: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.forecast.points.forecast_load", interrupted_at(1, forecast_load))
    with pytest.raises(InputError) as refused:
        main(["what-if", str(folder / "sessions.jsonl"), "--latency-model", str(folder / "model.json"), *flags])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_page_has_every_row_offline(folder: Path) -> None:
    result = forecast_rows(folder, Scenario({}, cold_prompts=True), Scenario({}, rate=2.0), trace="sessions")
    page = rendered(result)
    for row in result.points:
        assert row.name in page
    figures = page_figures(page)
    assert list(figures) == ["survival-all", "survival-turn1", "survival-turns2-"]
    lines = [trace["name"] for trace in figures["survival-all"]["data"] if trace["meta"]["part"] == "line"]
    assert lines == ["forecast of the capture", "cold prompts", "rate ×2"]
    bands = [trace for trace in figures["survival-all"]["data"] if trace["meta"]["part"] == "band"]
    assert all(low <= high for low, high in zip(bands[0]["y"], bands[1]["y"], strict=True))


def test_headline_has_the_best_scenario(folder: Path) -> None:
    result = forecast_rows(folder, Scenario({}, cold_prompts=True), Scenario({"max_num_seqs": 1}), trace="captured")
    base, cold, alone = result.points[1:]
    name = ttft("turns2+", "p90")
    best = min((cold, alone), key=lambda row: row.measures[name].value.middle or math.inf)
    values = f"{value_text(best, name)} ms ({effect_text(best, name)})"
    expected = f"TTFT p90 (turns 2+): {best.name} is nearest, {values}; {base.name} {value_text(base, name)} ms."
    assert headline(result) == expected
    assert f"<h1>{expected}</h1>".replace("turns 2+", "turns\u00a02+") in rendered(result)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
def test_a_browser_draws_the_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(rendered(forecast_rows(folder, Scenario({}, cold_prompts=True), trace="sessions")))
    assert figures_drawn(page) == {"survival-all", "survival-turn1", "survival-turns2-"}
