"""Simpler predictors against closed forms and sums done by hand."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from measure.runs import UNKNOWN, Run, load_run
from measure.waits import first_token_waits
from report.compare.cells import Cells, measure
from report.compare.ensembles import judge_baselines, losing_p
from sim.forecast.baselines import LINE, predictors, queued, service_ms
from sim.latency.modelfile import Baseline, default_model
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import Meta, Record, RequestId

MODEL = msgspec.structs.replace(
    default_model(),
    baselines={
        LINE: Baseline(
            formula="", intercept_ms=2.0, per_uncached_token_ms=0.25, median_abs_error=0.0, p90_abs_error=0.0
        )
    },
)


def run_of(path: Path, ttfts_ms: list[float], cached: int, first_prompt: int = 100) -> Run:
    """Requests a second apart, with prompts of 100, 101 … tokens and outputs of 5."""
    with TraceWriter(path, Meta(source="tap")) as writer:
        for number, ttft_ms in enumerate(ttfts_ms):
            writer.write(
                Record(
                    request_id=RequestId(f"r{number}"),
                    arrival_ms=1e3 * number,
                    ttft_ms=ttft_ms,
                    e2e_ms=ttft_ms,
                    prompt_tokens=first_prompt + number,
                    cached_tokens=cached,
                    output_tokens=5,
                )
            )
    return load_run("captured", path)


def test_lindley_by_hand_and_against_mm1() -> None:
    # Served from 0 to 3; the second waits 2 and is served from 3 to 4; the third finds the server idle.
    assert queued(np.array([0.0, 1.0, 5.0]), np.array([3.0, 1.0, 2.0])).tolist() == [3.0, 3.0, 2.0]
    random = np.random.default_rng(1)
    arrival_ms = np.cumsum(random.exponential(2.0, 200_000))
    waits_ms = queued(arrival_ms, random.exponential(1.0, 200_000))
    # M/M/1 at half load: exponential sojourn of mean 1 / (1 − 0.5) = 2.
    assert waits_ms.mean() == pytest.approx(2.0, rel=0.05)
    levels = np.array([0.5, 0.9, 0.99])
    assert np.quantile(waits_ms, levels) == pytest.approx(-2.0 * np.log(1.0 - levels), rel=0.05)


def test_service_times_are_the_models_for_a_request_alone() -> None:
    one, other = np.array([5_000, 5_000]), np.array([5_000, 8])
    alone_ms, later_ms = service_ms(MODEL, one, other, np.array([3, 1]))
    # Three chunks of at most 2,048 tokens; attention is half a square however it is cut.
    whole = 3 * 4.3 + 0.013 * 5_000 + 1.1e-5 * 5_000**2 / 2 + 7.0 + 0.0022 * 5_000
    cached = 4.3 + 0.013 * 8 + 1.1e-5 * (8 * 4_992 + 32) + 7.0 + 0.0022 * 5_000
    assert alone_ms.tolist() == pytest.approx([whole, cached])
    # Two tokens more, on 5,001 and 5,002 tokens of KV.
    assert later_ms.tolist() == pytest.approx([2 * 0.99 + 3e-5 * 10_003, 0.0])


def test_predictors_are_told_the_cached_tokens(tmp_path: Path) -> None:
    # Prompts of 100, 101 … 129 tokens, 60 of them cached; the truth is 2 ms and a quarter for each uncached token.
    truth = run_of(tmp_path / "t.jsonl", [2.0 + 0.25 * (40 + number) for number in range(30)], cached=60)
    rows = np.arange(30)
    cells: Cells = {("captured", "all", "ttft"): measure(first_token_waits(truth, rows), rows, None)}
    found = predictors(MODEL, truth)
    judged = judge_baselines(truth, {"all": rows}, cells, found)
    assert list(judged) == [LINE, "mg1_queue"]
    assert judged[LINE]["all"].median_abs_error == 0.0
    # A second between requests of 12 ms: the queue is empty.
    alone_ms = service_ms(MODEL, truth.prompt_tokens, truth.prompt_tokens - 60, truth.output_tokens)[0]
    assert found["mg1_queue"].ttft_ms.tolist() == pytest.approx(alone_ms.tolist())
    # Without sharing all tokens of a prompt are computed.
    cold = predictors(MODEL, truth, cold=True)
    assert cold[LINE].ttft_ms.tolist() == [2.0 + 0.25 * (100 + number) for number in range(30)]
    unsaid = replace(truth, cached_tokens=np.full(30, UNKNOWN))
    assert np.isnan(predictors(MODEL, unsaid)[LINE].ttft_ms).all()
    assert "mg1_queue" not in predictors(MODEL, unsaid)


def test_a_forecast_may_lose_as_a_right_model_does(tmp_path: Path) -> None:
    # 39 members 1 to 39 % above 100 ms, their middle at 120; a predictor says 118.
    middle = run_of(tmp_path / "m.jsonl", [120.0] * 100, cached=0)
    members = [replace(middle, ttft_ms=np.full(100, 100.0 + place)) for place in range(1, 40)]
    simple = {"simple": replace(middle, ttft_ms=np.full(100, 118.0))}

    def p_of(captured_ms: float) -> float | None:
        truth = replace(middle, ttft_ms=np.full(100, captured_ms))
        return losing_p(truth, members, middle, [np.arange(100)], simple)

    # The ratio of errors |120 − x| / |118 − x| is without bound at 118, and falls to both sides: 2 at 116, 1 at 119.
    assert p_of(118.0) == 2 / 40
    assert p_of(116.0) == 4 / 40  # 116, twice, 117 and 118
    assert p_of(150.0) == 20 / 40
    assert losing_p(members[0], members, middle, [np.arange(99)], simple) is None
