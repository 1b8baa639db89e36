"""``sim validate`` as a command: a capture of a known engine, forecasts of it, and the exit code that CI reads."""

import contextlib
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.__main__ import command, main
from sim.forecast.ensemble import members
from sim.forecast.saturation import BEYOND_LOG_SD
from sim.latency.fittraces import FitTrace, request_sample
from sim.latency.modelfile import Model, Parameter, default_model, load_model, save_model
from sim.latency.verdicts import read_verdicts
from tests.report.browser import CHROMIUM, figures_drawn
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta, Record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, synthetic: ModuleType) -> Path:
    """A model, two captures of its engine, one without its cache, and models that are off."""
    folder = tmp_path_factory.mktemp("validate")
    model = msgspec.structs.replace(default_model(), drift_log_sd=0.025)
    save_model(model, folder / "model.json")
    save_model(slower(model, 1.5), folder / "off.json")
    uncached = replace(model.engine, enable_prefix_caching=False)
    for name, engine, luck in (("a", model.engine, 11), ("b", model.engine, 12), ("cold", uncached, 13)):
        served = msgspec.structs.replace(model, engine=engine)
        records = synthetic.capture(synthetic.calibration(1, prompts=24, mixed=60), served, seed=luck)
        recorded = Engine(block_size=32, num_gpu_blocks=4096, enable_prefix_caching=engine.enable_prefix_caching)
        write(folder / f"{name}.jsonl", records, Meta(source="tap", block_size=32, engine=recorded))
    meta, records = load_trace(folder / "a.jsonl")
    write(folder / "part.jsonl", records[40:60], meta)
    sample = request_sample(records)
    source = FitTrace(digest=trace_digest(folder / "a.jsonl"), name="a.jsonl", requests=108, sample=sample)
    fitted = msgspec.structs.replace(model, fitted_on=[source])
    save_model(fitted, folder / "fitted.json")
    return folder


def slower(model: Model, factor: float) -> Model:
    return msgspec.structs.replace(
        model,
        parameters={name: Parameter(value=old.value * factor, unit=old.unit) for name, old in model.parameters.items()},
    )


def write(path: Path, records: list[Record], meta: Meta) -> None:
    with TraceWriter(path, meta) as writer:
        for record in records:
            writer.write(record)


def validate(folder: Path, *flags: str, model: str = "model.json", trace: str = "a.jsonl") -> tuple[int, Any]:
    argv = ["validate", str(folder / trace), "--latency-model", str(folder / model)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*argv, "--members", "20", "--bootstrap", "40", "--json", *flags])
    return code, json.loads(out.getvalue())


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_forecasts_of_the_models_engine_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = validate(folder, "--repeat", str(folder / "b.jsonl"))
    assert code == 0
    assert (result["schema"], result["repeats"]) == ("kvtape-validate/1", ["again"])
    made = result["forecasts"]["predicted"]
    assert (made["members"], made["pacing"], made["saturated"], made["preempted"]) == (20, "sessions", False, 0)
    assert made["settings"]["num_gpu_blocks"] == 4096
    pair = result["pairs"]["predicted"]
    assert (pair["truth"], pair["joined"], pair["kind"]) == ("captured", 108, "error")
    everything = pair["cohorts"]["all"]
    assert everything["cached"]["exact_share"] == 1.0
    assert everything["ttft"]["p50"]["inside_band"] is True
    assert everything["ttft"]["verdict"] == "within band"
    assert pair["coverage"]["p_value"] >= 0.05
    assert result["traces"]["predicted"]["members"] == 20
    assert [gate["passed"] for gate in result["gates"]] == [True] * 5
    assert "worst " in next(gate["reason"] for gate in result["gates"] if gate["name"] == "TTFT p50")
    assert result["headline"][0].startswith("predicted against captured: TTFT of ")
    screen = capsys.readouterr().err.splitlines()
    assert screen[0] == "verdict: passed (5 of 5 gates)"
    assert len(screen) <= 40
    assert max(map(len, screen)) <= 100
    validate(folder, "--repeat", str(folder / "b.jsonl"), "-v")
    tables = capsys.readouterr().err
    assert "TTFT of predicted against captured" in tables
    assert max(len(line) for line in tables.splitlines() if "  " in line) <= 100


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
def test_a_browser_draws_the_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    validate(folder, "--cold", str(folder / "cold.jsonl"), "--html", str(page))
    html = page.read_text()
    assert "Forecast and capture" in html
    assert "cold-predicted against cold" in html
    assert figures_drawn(page) >= {"survival-all", "survival-turns2-"}


def test_wrong_model_fails_the_gates(folder: Path) -> None:
    code, result = validate(folder, model="off.json")
    assert code == 1
    passed = {gate["expression"].partition(": ")[2][:10]: gate["passed"] for gate in result["gates"]}
    assert passed["cached tok"] is True
    assert passed["TTFT p50 w"] is False
    assert passed["bands hold"] is False
    # At the pace of the captured steps the same shape is correct, and all gates pass.
    paced = result["pairs"]["predicted-at-pace"]["cohorts"]["all"]["ttft"]["p50"]
    assert abs(paced["signed_error"]) < 0.05
    assert result["pairs"]["predicted"]["cohorts"]["all"]["ttft"]["p50"]["signed_error"] > 0.2
    assert result["forecasts"]["predicted-at-pace"]["pace"] == pytest.approx(1 / 1.5, rel=0.05)
    assert not any(gate["expression"].startswith("predicted-at-pace") for gate in result["gates"])
    assert result["pairs"]["predicted"]["cohorts"]["all"]["ttft"]["verdict"].startswith("off by ")


def test_band_wider_than_gate_limits_is_uncertain(folder: Path) -> None:
    """The right model under a drift of 40 %: nothing fails, and nothing of TTFT is shown."""
    wide = msgspec.structs.replace(load_model(folder / "model.json"), drift_log_sd=0.4)
    save_model(wide, folder / "wide.json")
    code, result = validate(folder, model="wide.json")
    assert code == 3
    states = {gate["name"]: (gate["passed"], gate["uncertain"]) for gate in result["gates"]}
    assert [states[name] for name in ("cached tokens", "bands")] == [(True, False)] * 2
    assert [states[f"TTFT {level}"] for level in ("p50", "p90", "p99")] == [(False, True)] * 3
    verdict = result["pairs"]["predicted"]["cohorts"]["all"]["ttft"]["verdict"]
    assert re.fullmatch(r"too uncertain to say, band ± \d+\.\d % at p\d\d", verdict)
    pace, bands = result["next_steps"]
    assert pace == "the engine's pace differs by 49.2 % between the fitted captures: capture on an idle machine"
    assert "calibrations and more, captured before, between and after the loads" in bands
    [kept] = read_verdicts(folder / "wide.json", wide)
    assert str(kept).startswith("too uncertain on TTFT p50 (")


def test_extrapolated_forecast_has_a_wider_band() -> None:
    """Without drift and draws all members have the same speed; two doublings beyond the fitted range spread them."""
    model = msgspec.structs.replace(default_model(), drift_log_sd=0.0)
    near, far = members(model, 32, 1), members(model, 32, 1, 2 * BEYOND_LOG_SD)
    speeds = np.log([member.parameters["t0_ms"].value / model.parameters["t0_ms"].value for member in far])
    assert {member.parameters["t0_ms"].value for member in near} == {model.parameters["t0_ms"].value}
    assert np.std(speeds) == pytest.approx(0.4, rel=0.15)
    assert np.mean(speeds) == pytest.approx(0.0, abs=1e-9)


def test_cached_token_gate_is_not_tested_without_reports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meta, records = load_trace(folder / "a.jsonl")
    for record in records:
        record.cached_tokens = None
    write(folder / "unreported.jsonl", records, meta)
    code, result = validate(folder, trace="unreported.jsonl")
    (gate,) = (row for row in result["gates"] if row["name"] == "cached tokens")
    assert (gate["value"], gate["passed"]) == (None, True)
    assert "tap --inject usage" in gate["reason"]
    assert code == int(any(not (row["passed"] or row["uncertain"]) for row in result["gates"]))
    assert "gate not tested: predicted: cached tokens exact" in capsys.readouterr().err
    main(["what-if", str(folder / "unreported.jsonl"), "--latency-model", str(folder / "model.json"), "--members", "2"])
    assert "(not tested: cached tokens)" in unwrapped(capsys.readouterr().out)
    with pytest.raises(InputError, match=r"tap --inject usage, or have clients send stream_options\.include_usage"):
        main(["audit", str(folder / "unreported.jsonl"), "--max-num-seqs", "32", "--max-num-batched-tokens", "2048"])


def test_forecasts_print_the_models_validation(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On this trace, on another of the same engine, on none; a model that was fitted again has no verdict."""
    for name in ("a", "b"):
        meta, records = load_trace(folder / f"{name}.jsonl")
        engine = Engine(name="vllm", version="0.9", block_size=32, num_gpu_blocks=4096)
        write(tmp_path / f"{name}.jsonl", records, msgspec.structs.replace(meta, engine=engine))
    (tmp_path / "off.json").write_bytes((folder / "off.json").read_bytes())
    options = ["--latency-model", str(tmp_path / "off.json"), "--members", "2"]

    def output_of(command: str, trace: str, *flags: str) -> str:
        assert main([command, str(tmp_path / trace), *options, *flags]) in (0, 1)
        return unwrapped(capsys.readouterr().out)

    assert "the latency model was never validated" in output_of("what-if", "a.jsonl")
    validate(tmp_path, model="off.json")
    capsys.readouterr()
    text = output_of("what-if", "a.jsonl")
    assert "sim validate on this trace: failed TTFT p50 (" in text
    assert "; forecast of this capture: TTFT of all requests is off by +" in text
    other = output_of("search", "b.jsonl", "--maximize", "rate", "--target", "ttft.p50<=1s", "--between", "1,1.1")
    assert "not validated on this trace; sim validate on a.jsonl, same engine: failed TTFT p50 (" in other
    # Search, sweep and what-if print a warning, and the result contains the warning.
    sentence = "more than the gates' 5.0 %, 10.0 % and 15.0 % at p50, p90 and p99: do not rely on effects"
    (tmp_path / "grid.toml").write_text("[axes]\nmax-num-seqs = [16, 32]\n")
    assert sentence in text
    assert sentence in other
    assert "(not to be trusted: the model's error on this capture" in other
    assert main(["sweep", str(tmp_path / "grid.toml"), str(tmp_path / "b.jsonl"), *options]) in (0, 1)
    swept = unwrapped(capsys.readouterr().out)
    assert sentence in swept
    assert "(not to be trusted: the model's error on this capture" in swept
    output = ["-o", str(tmp_path / "predicted.jsonl")]
    assert main(["run", str(tmp_path / "a.jsonl"), *options[:2], *output]) == 0
    assert load_trace(tmp_path / "predicted.jsonl")[0].extra["validation"] in text
    save_model(slower(default_model(), 1.4), tmp_path / "off.json")
    assert "the latency model was never validated" in output_of("what-if", "a.jsonl")


def test_other_engine_gives_a_warning(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, version and settings of the trace's header."""
    meta, records = load_trace(folder / "b.jsonl")
    engine = Engine(name="sglang", version="0.5", block_size=32, num_gpu_blocks=4096, max_num_seqs=64)
    write(tmp_path / "other.jsonl", records, msgspec.structs.replace(meta, engine=engine))
    model = load_model(folder / "model.json")
    save_model(
        msgspec.structs.replace(model, diagnostics={"engine": {"name": "vllm", "version": "0.9"}}), tmp_path / "m.json"
    )
    warning = (
        "the model is of another engine than the trace (name sglang, fitted on vllm; version 0.5, fitted on 0.9; "
        "max_num_seqs 64, fitted under 32): its step times may not hold here"
    )
    trace = [str(tmp_path / "other.jsonl"), "--latency-model", str(tmp_path / "m.json")]
    for words in (["what-if", *trace, "--members", "2"], ["run", *trace, "-o", str(tmp_path / "predicted.jsonl")]):
        main(words)
        printed = capsys.readouterr()
        assert unwrapped(printed.out + printed.err).count(warning) == 1


def test_custom_gates(folder: Path) -> None:
    gate = "predicted.all.ttft.p50.error<=1%"
    code, result = validate(folder, "--no-default-gates", "--gate", gate, model="off.json")
    assert (code, [row["expression"] for row in result["gates"]]) == (1, [gate])
    assert validate(folder, "--no-default-gates", model="off.json")[0] == 0
    kept = read_verdicts(folder / "off.json", load_model(folder / "off.json"))[-1]
    assert kept.gates == 0
    assert str(kept).startswith("compared without gates, TTFT of all requests off by +")
    with pytest.raises(InputError, match="no cohort 'warm'"):
        validate(folder, "--gate", "predicted.warm.ttft.p50.error<=1%")


def test_cold_is_forecast_from_the_warm_capture(folder: Path) -> None:
    _, result = validate(folder, "--cold", str(folder / "cold.jsonl"))
    assert {label: (pair["truth"], pair["kind"]) for label, pair in result["pairs"].items()} == {
        "cold": ("captured", "contrast"),
        "predicted": ("captured", "error"),
        "predicted-at-pace": ("captured", "error"),
        "cold-predicted": ("cold", "error"),
        "cold-predicted-at-pace": ("cold", "error"),
    }
    # The pace is measured on steps of the cold capture: the same engine with different noise.
    assert result["forecasts"]["cold-predicted-at-pace"]["pace"] == pytest.approx(1.0, abs=0.03)
    made = result["forecasts"]["cold-predicted"]
    assert (made["settings"]["enable_prefix_caching"], made["pacing"]) == (False, "sessions")
    later = result["pairs"]["cold-predicted"]["cohorts"]["all"]
    assert (later["cached"]["exact_share"], later["cached"]["other_hit_ratio"]) == (1.0, 0.0)
    assert later["ttft"]["p90"]["inside_band"] is True


def test_invalid_input_prints_a_single_line_with_exit_code_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sim", "validate", str(folder / "a.jsonl"), "--latency-model", str(folder / "fitted.json")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    assert "the model was fitted on this trace (a.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeat", "a.jsonl"], "fitted on this trace"),
        (["--cold", "part.jsonl"], r"part\.jsonl: has requests of a\.jsonl, a trace of the model's fit"),
        (["--members", "0"], "--members 0: expected 1 or more"),
    ],
)
def test_rejected_input(folder: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=message):
        main(["validate", "b.jsonl", "--latency-model", "fitted.json", *flags])
