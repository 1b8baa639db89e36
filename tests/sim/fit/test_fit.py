"""The fit on engines with known parameters, and its diagnostics for unidentified parameters."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import ModuleType

import msgspec
import numpy as np
import pytest

from sim.__main__ import main
from sim.engine.simulation import step_noise
from sim.fit.drift import Drift, drift_of_mean, estimate_drift
from sim.fit.fitting import FitConfig, Fitted, fit_traces
from sim.fit.observations import Observations
from sim.fit.regression import bootstrap, estimate_noise, solve
from sim.fit.residuals import requests_of
from sim.fit.variants import choose_terms
from sim.latency.fittraces import request_sample
from sim.latency.modelfile import Model, default_model, load_model
from sim.latency.noise import LEVELS, Noise
from sim.latency.stepcost import CHUNKS, RECEIVED
from sim.latency.terms import TERMS
from tests.sim.synthetic import engine_of
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta, Record, RequestId


def write(path: Path, records: list[Record], engine: Engine | None) -> Path:
    with TraceWriter(path, Meta(source="tap", block_size=32, engine=engine)) as writer:
        for record in records:
            writer.write(record)
    return path


Learn = Callable[..., Fitted]


@pytest.fixture
def learn(tmp_path: Path, synthetic: ModuleType) -> Learn:
    """Capture the calibration load on a true engine and fit the capture."""

    def capture_and_fit(truth: Model, seed: int, spread: float = 0.05, **options: object) -> Fitted:
        options.setdefault("frontend", truth.frontend_placement)
        records = synthetic.capture(synthetic.calibration(seed), truth, seed, spread)
        path = write(tmp_path / f"capture-{len(list(tmp_path.iterdir()))}.jsonl", records, engine_of(truth))
        return fit_traces(FitConfig((path,), tmp_path / "model.json", {}, **options))  # type: ignore[arg-type]

    return capture_and_fit


def assert_recovered(truth: Model, fitted: Model) -> None:
    """Each parameter within 5 % or inside its interval, made half as wide again: one in twenty of 95 % misses."""
    for name, parameter in truth.parameters.items():
        got = fitted.parameters[name]
        assert got.low is not None
        assert got.high is not None
        near = abs(got.value / parameter.value - 1.0) <= 0.05
        slack = (got.high - got.low) / 4
        inside = got.low - slack <= parameter.value <= got.high + slack
        assert near or inside, f"{name}: {parameter.value} found as {got}"


@pytest.mark.parametrize("seed", [1, 2])
def test_noisy_engine_is_fitted(learn: Learn, seed: int) -> None:
    truth = default_model()
    fitted = learn(truth, seed)
    assert_recovered(truth, fitted.model)
    assert fitted.model.diagnostics["cached_agreement"] == 1.0
    assert fitted.model.diagnostics["errors"]["median_abs"] < 0.03


def test_scheduling_is_fitted(learn: Learn) -> None:
    """Faster steps, cheaper attention, dearer KV, a serial front end, composing ahead."""
    step = {
        "t0_ms": 1.5,
        "per_prefill_token_ms": 0.004,
        "per_attention_token2_ms": 6e-6,
        "per_decode_ms": 0.3,
        "per_kv_token_ms": 6e-5,
    }
    truth = msgspec.structs.replace(
        default_model(),
        parameters={
            name: msgspec.structs.replace(parameter, value=step.get(name, parameter.value))
            for name, parameter in default_model().parameters.items()
        },
        engine=replace(default_model().engine, async_scheduling=True),
        frontend_placement="serial",
    )
    assert truth.frontend_placement == "serial"
    assert_recovered(truth, learn(truth, 5).model)


def test_shared_core_is_fitted(learn: Learn) -> None:
    truth = msgspec.structs.replace(default_model(), frontend_placement="shared_core")
    fitted = learn(truth, 13, frontend=None).model
    assert fitted.frontend_placement == "shared_core"
    assert_recovered(truth, fitted)


def test_unknown_scheduling_is_tried(tmp_path: Path, synthetic: ModuleType) -> None:
    for ahead in (False, True):
        truth = default_model()
        truth = msgspec.structs.replace(truth, engine=replace(truth.engine, async_scheduling=ahead))
        records = synthetic.capture(synthetic.calibration(7, prompts=20, mixed=70), truth)
        path = write(tmp_path / f"{ahead}.jsonl", records, engine_of(truth, async_scheduling=None))
        fitted = fit_traces(FitConfig((path,), tmp_path / "model.json", {}, frontend="parallel"))
        assert len(fitted.model.diagnostics["variants"]) == 2
        assert fitted.model.engine.async_scheduling == ahead


def test_fit_converges_under_load(tmp_path: Path, synthetic: ModuleType) -> None:
    """A capture in saturation: a run of its own would drift from it, one that keeps to the seen tokens does not."""
    truth = default_model()
    load = synthetic.calibration(20, prompts=25, mixed=150)
    first_ms = next(record.arrival_ms for record in load if record.request_id.startswith("mixed"))
    for record in load:
        if record.request_id.startswith("mixed"):
            record.arrival_ms = first_ms + (record.arrival_ms - first_ms) / 5
    records = synthetic.capture(load, truth, spread=0.15)
    assert max(record.concurrency or 0 for record in records) > 40
    path = write(tmp_path / "busy.jsonl", records, engine_of(truth))
    fitted = fit_traces(FitConfig((path,), tmp_path / "model.json", {}, frontend="parallel")).model
    assert fitted.diagnostics["misfits"] == 0
    for name in ("t0_ms", "per_prefill_token_ms", "per_attention_token2_ms", "frontend_base_ms"):
        assert fitted.parameters[name].value == pytest.approx(truth.parameters[name].value, rel=0.15), name


def test_fit_is_reproducible(learn: Learn, tmp_path: Path) -> None:
    truth = default_model()
    first, second = learn(truth, 9).model, learn(truth, 9).model
    names = {"fitted_on"}
    for field in set(Model.__struct_fields__) - names:
        assert getattr(first, field) == getattr(second, field), field
    assert first.fit_digests == second.fit_digests


def test_decodes_do_not_identify_prefill_terms(tmp_path: Path, synthetic: ModuleType) -> None:
    """Cold prompts within a small chunk: contexts are short, so the attention cost is not identified."""
    records = [
        record
        for record in synthetic.calibration(10, prompts=60, mixed=0)
        if (record.prompt_tokens or 0) < 600 and record.turn == 1
    ]
    truth = default_model()
    path = write(tmp_path / "short.jsonl", synthetic.capture(records, truth), engine_of(truth))
    fitted = fit_traces(FitConfig((path,), tmp_path / "model.json", {}, frontend="parallel"))
    open_terms = {term.name: term for term in fitted.unidentified}
    assert "per_attention_token2_ms" in open_terms
    assert "longer" in open_terms["per_attention_token2_ms"].capture
    assert not fitted.model.parameters["per_attention_token2_ms"].identified


def test_cached_tokens_replace_hashes(tmp_path: Path, synthetic: ModuleType) -> None:
    truth = default_model()
    hashed = synthetic.capture(synthetic.calibration(14, prompts=25, mixed=30), truth)
    bare = [msgspec.structs.replace(record, block_hashes=None, output_block_hashes=None) for record in hashed]
    models = [
        fit_traces(
            FitConfig(
                (write(tmp_path / name, records, engine_of(truth)),), tmp_path / "m.json", {}, frontend="parallel"
            )
        ).model
        for name, records in (("hashed.jsonl", hashed), ("bare.jsonl", bare))
    ]
    assert models[0].parameters == models[1].parameters
    assert models[1].diagnostics["cached_agreement"] is None
    blind = [msgspec.structs.replace(record, cached_tokens=None) for record in bare]
    path = write(tmp_path / "blind.jsonl", blind, engine_of(truth))
    with pytest.raises(InputError, match="neither block_hashes nor cached_tokens"):
        fit_traces(FitConfig((path,), tmp_path / "m.json", {}))


def test_too_small_capture_is_rejected(tmp_path: Path, synthetic: ModuleType) -> None:
    truth = default_model()
    records = synthetic.capture(synthetic.calibration(11), truth)
    few = write(tmp_path / "few.jsonl", records[:12], engine_of(truth))
    alike = [record for record in synthetic.calibration(11, prompts=0, mixed=200) if record.prompt_tokens == 700]
    same = write(tmp_path / "same.jsonl", synthetic.capture(alike, truth), engine_of(truth))
    unsettled = write(tmp_path / "unsettled.jsonl", records, None)
    good = write(tmp_path / "good.jsonl", records, engine_of(truth))
    copy = write(tmp_path / "copy.jsonl.zst", records, engine_of(truth))
    for traces, message in (
        ((few,), "only 12 requests"),
        ((same,), "nearly equal lengths"),
        ((unsettled,), "--num-gpu-blocks"),
        ((good, copy), "copy.jsonl.zst: the model was fitted on this trace .good.jsonl"),
        ((few, good), "good.jsonl: has requests of few.jsonl, a trace of the model's fit"),
    ):
        with pytest.raises(InputError, match=message):
            fit_traces(FitConfig(traces, tmp_path / "model.json", {}))


def test_fit_command_writes_a_model(tmp_path: Path, synthetic: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    truth = default_model()
    path = write(tmp_path / "trace.jsonl.zst", synthetic.capture(synthetic.calibration(12), truth), None)
    (tmp_path / "shape.toml").write_text('[sim.calibrate]\napi-server = "serial"\n')
    flags = ["--num-gpu-blocks", "4096", "--no-async-scheduling", "--config", str(tmp_path / "shape.toml"), "-o"]
    assert main(["calibrate", str(path), *flags, str(tmp_path / "m.json")]) == 0
    model = load_model(tmp_path / "m.json")
    assert model.fitted_on[0].name == "trace.jsonl.zst"
    assert model.fitted_on[0].sample == request_sample(load_trace(path)[1])
    assert model.diagnostics["assumed_settings"] == {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    assert "max_num_seqs = 256" in capsys.readouterr().err
    assert json.loads((tmp_path / "m.json").read_bytes())["schema"] == "kvtape-model/2"


def observations(counts: list[list[float]], seen: list[float], prefill: list[bool]) -> Observations:
    padded = np.zeros((len(counts), len(TERMS)))
    padded[:, : len(counts[0])] = counts
    number, no = np.arange(len(counts)), np.zeros(len(counts), dtype=np.bool_)
    starts = np.cumsum([0.0, *seen])[:-1]
    return Observations(
        starts,
        np.array(seen),
        padded,
        np.array(prefill),
        no,
        np.ones(len(counts), dtype=np.int64),
        number % 5,
        0 * number,
    )


def vector(*values: float) -> FloatArray:
    return np.array([*values, *[0.0] * (len(TERMS) - len(values))])


def test_outliers_and_many_decodes_do_not_move_the_prefills() -> None:
    rng = np.random.default_rng(0)
    prefills = [[1.0, tokens] for tokens in rng.uniform(100, 5000, 60)]
    decodes = [[1.0, 0.0]] * 5000
    truth = np.array([5.0, 0.02])
    seen = [float(np.dot(row, truth)) * float(rng.normal(1, 0.01)) for row in prefills + decodes]
    for outlier in (3, 17, 40, 500, 900):
        seen[outlier] *= 5.0
    rows = observations(prefills + decodes, seen, [True] * 60 + [False] * 5000)
    solution = solve(rows, [0, 1])
    assert solution.parameters[:2] == pytest.approx(truth, rel=0.01)
    draws = bootstrap(rows, solution.weights, [0, 1], 100, 0)
    low, high = np.quantile(draws[:, 1], [0.025, 0.975])
    assert low < solution.parameters[1] < high < 1.1 * low


def test_no_parameter_is_negative() -> None:
    rows = observations([[1.0, n] for n in range(1, 41)], [100.0 - n for n in range(1, 41)], [True] * 40)
    parameters = solve(rows, [0, 1]).parameters
    assert parameters[1] == 0.0
    assert parameters[0] > 0.0


def test_noise_by_step_length_and_autocorrelation() -> None:
    """Steps of 10 ms that vary by 20 %, steps of 400 ms that vary by 2 %, and luck of which half lasts for 300 ms."""
    ladder = np.array([NormalDist().inv_cdf(level) for level in LEVELS])
    noise = Noise(
        step_ms=(10.0, 400.0),
        step_log_ratio=(tuple(0.2 * ladder), tuple(0.02 * ladder)),
        autocorrelated_share=0.5,
        correlation_time_ms=300.0,
    )
    counts, luck = [[1.0, 0.0]] * 4000 + [[1.0, 390.0]] * 300, step_noise(noise, 3)
    now_ms, seen = 0.0, list[float]()
    for row in counts:
        seen.append((10.0 * row[0] + row[1]) * luck.factor(now_ms, 10.0 * row[0] + row[1]))
        now_ms += seen[-1]
    estimate = estimate_noise(observations(counts, seen, [row[1] > 0 for row in counts]), vector(10.0, 1.0))
    assert estimate.step_ms == (10.0, 400.0)
    for logs, spread in zip(estimate.step_log_ratio, (0.2, 0.02), strict=True):
        assert logs[LEVELS.index(0.9)] - logs[LEVELS.index(0.1)] == pytest.approx(2 * 1.2816 * spread, rel=0.15)
    assert estimate.autocorrelated_share == pytest.approx(0.5, abs=0.1)
    assert estimate.correlation_time_ms == pytest.approx(300.0, rel=0.5)


def test_merged_steps_have_less_noise() -> None:
    rng = np.random.default_rng(2)
    sums = [float(np.exp(0.1 * rng.standard_normal(4)).sum()) * 100.0 for _ in range(400)]
    together = replace(observations([[4.0]] * 400, sums, [True] * 400), steps=np.full(400, 4))
    row = estimate_noise(together, vector(100.0)).step_log_ratio[0]
    assert row[LEVELS.index(0.9)] - row[LEVELS.index(0.1)] == pytest.approx(2 * 1.2816 * 0.1, rel=0.15)


def test_late_read_is_no_fast_step() -> None:
    """Every tenth of the prefills' ends was read 80 ms late: one looks as much longer as the next looks shorter."""
    seen = [100.0 + 80.0 * (number % 10 == 0) - 80.0 * (number % 10 == 1) for number in range(400)]
    row = estimate_noise(observations([[1.0]] * 400, seen, [True] * 400), vector(100.0)).step_log_ratio[0]
    assert row == pytest.approx([0.0] * len(LEVELS), abs=1e-6)


def test_api_server_noise_excludes_step_noise() -> None:
    """An API server of 20 ms that varies by 10 % before steps of 10 ms that vary by 20 %: 2 ms each."""
    rng = np.random.default_rng(8)
    steps = [10.0 * float(np.exp(0.2 * normal)) for normal in rng.standard_normal(1200)]
    fronts = [20.0 * float(np.exp(0.1 * normal)) for normal in rng.standard_normal(400)]
    alone = observations([[1.0]] * 800, steps[:800], [False] * 800)
    opening = observations(
        [[1.0, *[0.0] * (RECEIVED - 1), 1.0]] * 400,
        [sum(each) for each in zip(fronts, steps[800:], strict=True)],
        [True] * 400,
    )
    seen = Observations.join([alone, replace(opening, opens=np.ones(400, dtype=np.bool_))])
    parameters = vector()
    parameters[[0, RECEIVED]] = 10.0, 20.0
    row = estimate_noise(seen, parameters).frontend_log_ratio
    # With the steps' noise left in it would be wider by the square root of two.
    assert row[LEVELS.index(0.8)] - row[LEVELS.index(0.2)] == pytest.approx(2 * 0.8416 * 0.1, rel=0.15)


def test_drift_is_the_variation_between_captures() -> None:
    """Six captures of one engine, steady, at speeds that differ by 10 %; then a single capture: no drift is fitted."""
    rng = np.random.default_rng(5)
    parts = []
    for speed in np.exp(0.1 * rng.standard_normal(6)):
        seen = (10.0 * speed * np.exp(0.05 * rng.standard_normal(400))).tolist()
        parts.append(observations([[1.0]] * 400, seen, [False] * 400))
    speeds = [np.median(np.log(part.measured_ms / 10.0)) for part in parts]
    # A further capture differs from the six by s and by the error of their mean.
    expected = float(np.sqrt(np.var(speeds, ddof=1) * (1 + 1 / 6)))
    drift = estimate_drift(Observations.join(parts), vector(10.0))
    assert drift.log_sd == pytest.approx(expected, rel=1e-4)
    assert drift.freedom == 5
    # The mean of six is known to s / √6, at 97.5 % of Student's t with 5 degrees of freedom; of one, not at all.
    assert drift_of_mean(drift, 6) == pytest.approx(2.5706 * np.std(speeds, ddof=1) / np.sqrt(6), rel=1e-4)
    assert drift_of_mean(drift, 1) == 0.0
    alone = estimate_drift(parts[0], vector(10.0))
    assert alone.log_sd < 0.01
    assert alone.freedom == 3
    nothing = parts[0].select(np.zeros(400, dtype=np.bool_))
    assert estimate_drift(nothing, vector(10.0)) == Drift(0.0, 0)


def test_terms_are_selected_on_held_out_data() -> None:
    """Two captures of an engine with a cost per chunk, and two without it: the term is selected only with the cost."""
    rng = np.random.default_rng(6)

    def captures(chunk_ms: float) -> Observations:
        parts = []
        for _ in range(2):
            tokens, chunks = rng.uniform(50, 2000, 80), rng.integers(1, 6, 80)
            rows = [
                [1.0, each, *[0.0] * (CHUNKS - 2), float(count)] for each, count in zip(tokens, chunks, strict=True)
            ]
            rows += [[1.0] + [0.0] * CHUNKS] * 80
            true = [5.0 * row[0] + 0.02 * row[1] + chunk_ms * row[CHUNKS] for row in rows]
            seen = [ms * float(np.exp(0.05 * rng.standard_normal())) for ms in true]
            parts.append(observations(rows, seen, [row[1] > 0 for row in rows]))
        return Observations.join(parts)

    def same(fold: int, parameters: FloatArray) -> float:
        return 0.05

    assert choose_terms(captures(10.0), same)[-1].extra_terms == ("per_prefill_chunk_ms",)
    assert choose_terms(captures(0.0), same)[-1].extra_terms == ()
    # A term that every simulated TTFT needs is selected, whatever its effect on intervals.
    selections = choose_terms(captures(0.3), lambda fold, parameters: 0.0 if parameters[CHUNKS] else 1.0)
    assert selections[-1].extra_terms == ("per_prefill_chunk_ms",)


def test_aborted_request_without_token_is_waiting() -> None:
    """Its TTFT is longer than its time. An error and an end without times are not used."""
    records = [
        Record(request_id=RequestId("left"), status="client_abort", e2e_ms=7.0),
        Record(request_id=RequestId("failed"), status="error", e2e_ms=8.0),
        Record(request_id=RequestId("gone"), status="client_abort"),
        Record(request_id=RequestId("seen"), ttft_ms=9.0, e2e_ms=30.0),
    ]
    observed = requests_of(records, [0] * 4, [5.0] * 4)
    assert (observed.request.tolist(), observed.measured_ms.tolist(), observed.censored.tolist()) == (
        [0, 3],
        [7.0, 9.0],
        [True, False],
    )
