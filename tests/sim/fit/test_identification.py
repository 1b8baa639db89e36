"""Unidentified terms of a fit, the missing load of each, and the suggested capture."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.loadflags import parse_config
from sim.fit.fitting import FitConfig, Fitted, fit_traces
from sim.fit.identification import (
    Coverage,
    describe_open,
    missing_range,
    next_capture,
)
from sim.forecast.calibrate import describe_fit
from sim.latency.modelfile import default_model
from sim.vllm.config import EngineConfig
from tests.sim import planned

ALL = Coverage(
    step_tokens=2048,
    shortest_cold=16,
    longest_cold=9000,
    longest_warm=9500,
    answers_at_once=8,
    shallowest_answer=90,
    deepest_answer=9000,
    idle_arrivals=20,
)


@pytest.mark.parametrize(
    ("changes", "parameter", "message"),
    [
        ({"shortest_cold": 3000}, "per_prefill_token_ms", "cold prompts are all of 3,000 to 9,000 tokens"),
        ({"answers_at_once": 1}, "per_decode_ms", "never more than 1 outputs were generated at once"),
        ({"longest_warm": 0}, "frontend_ms_per_prompt_token", "no prompt was warm"),
    ],
)
def test_missing_load_is_reported(changes: dict[str, int], parameter: str, message: str) -> None:
    assert missing_range(parameter, replace(ALL, **changes)) == message
    assert missing_range(parameter, ALL) is None


def fit(folder: Path, flags: str) -> Fitted:
    """What is learnt of an engine that was sent this load."""
    config = parse_config(["--url", "http://x", "-o", "t", *shlex.split(flags)])
    truth = default_model()
    path = planned.write(folder / "capture.jsonl", planned.capture(config, truth, spread=0.05), truth)
    return fit_traces(FitConfig((path,), folder / "model.json", {}, frontend="parallel", bootstrap=100))


@pytest.mark.parametrize(
    ("load", "lacking"),
    [
        (
            "--prompt-tokens 16:500 --parallel 4",
            {"per_attention_token2_ms": "no cold prompt", "per_kv_token_ms": "outputs had"},
        ),
        (
            "--prompt-tokens 64:9000 --parallel 1",
            {
                "per_decode_ms": "never more than 1 outputs",
                # Received and computed are the same tokens in every request.
                "frontend_ms_per_prompt_token": "no prompt was warm; only its sum with per_prefill_token_ms shows",
                "per_prefill_token_ms": "only its sum with frontend_ms_per_prompt_token shows",
            },
        ),
    ],
)
def test_incomplete_load_leaves_terms_unidentified(tmp_path: Path, load: str, lacking: dict[str, str]) -> None:
    fitted = fit(tmp_path, f"--number 60 --output-tokens 8:24 {load}")
    unidentified = {term.name: term for term in fitted.unidentified}
    text = "\n".join(describe_open(fitted.unidentified, fitted.model.diagnostics["next_capture"])).replace(
        " \\\n   ", ""
    )
    for name, why in lacking.items():
        assert unidentified[name].why.startswith(why)
        assert not fitted.model.parameters[name].identified
        assert f"  {name}: {why}" in text
    # The suggested capture is a valid loadgen command, with prompts that fit the engine.
    command = re.search(r"^  loadgen (.*)$", text, re.MULTILINE)
    assert command is not None
    config = parse_config(shlex.split(command[1]))
    assert (config.pattern, str(config.prompt_tokens)) == ("calibration", "64:10000")


def test_calibration_load_identifies_all_terms(tmp_path: Path) -> None:
    fitted = fit(tmp_path, "--pattern calibration --number 78 --seed 5")
    assert fitted.unidentified == []
    assert fitted.model.diagnostics["next_capture"] is None
    held = Coverage(**fitted.model.diagnostics["coverage"])
    assert [missing_range(name, held) for name in fitted.model.parameters] == [None] * 8
    assert held.answers_at_once >= 7  # of 8, nearly at once
    assert held.longest_cold > 6000
    assert str(held) in " ".join(map(str.strip, describe_fit(fitted.model)))


@pytest.mark.parametrize(
    ("engine", "prompts", "parallel"),
    [
        (EngineConfig(num_gpu_blocks=10_000, max_num_batched_tokens=2048), "64:10000", 16),
        (EngineConfig(num_gpu_blocks=10_000, max_model_len=4096), "64:2700", 16),
    ],
)
def test_suggested_capture_fits_the_engine(engine: EngineConfig, prompts: str, parallel: int) -> None:
    command = next_capture(engine)
    config = parse_config(shlex.split(command.removeprefix("loadgen ")))
    assert (str(config.prompt_tokens), config.parallel) == (prompts, parallel)
