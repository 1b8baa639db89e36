"""What a fit says that its captures leave open, for want of what, and the capture that would tell."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from loadgen.loadflags import parse_config
from sim.fit.fit import describe_fit
from sim.fit.fitting import FitConfig, Fitted, fit_traces
from sim.fit.identification import (
    Coverage,
    Unidentified,
    describe_open,
    lack,
    next_capture,
    require_enough,
)
from sim.latency.modelfile import default_model
from sim.vllm.config import EngineConfig
from tracefile import InputError

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
    ("changes", "parameter", "said"),
    [
        ({"shortest_cold": 3000}, "per_prefill_token_ms", "cold prompts are all of 3,000 to 9,000 tokens"),
        (
            {"longest_cold": 600},
            "per_attention_token2_ms",
            "no cold prompt is longer than 600 tokens, and a step takes 2,048",
        ),
        ({"answers_at_once": 1}, "per_decode_ms", "never more than 1 outputs were generated at once"),
        ({"deepest_answer": 300}, "per_kv_token_ms", "outputs had 90 to 300 tokens behind them"),
        ({"idle_arrivals": 0}, "frontend_base_ms", "requests that came to an idle engine: 0"),
        ({"longest_warm": 0}, "frontend_ms_per_prompt_token", "no prompt was warm"),
        ({"longest_warm": 700}, "frontend_ms_per_prompt_token", "the longest warm prompt has 700 tokens"),
    ],
)
def test_what_is_lacking_is_named(changes: dict[str, int], parameter: str, said: str) -> None:
    assert lack(parameter, replace(ALL, **changes)) == said
    assert lack(parameter, ALL) is None


def fit(planned: ModuleType, folder: Path, flags: str) -> Fitted:
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
def test_a_load_that_lacks_something_leaves_it_open(
    planned: ModuleType, tmp_path: Path, load: str, lacking: dict[str, str]
) -> None:
    fitted = fit(planned, tmp_path, f"--number 60 --output-tokens 8:24 {load}")
    found = {one.name: one for one in fitted.unidentified}
    said = "\n".join(describe_open(fitted.unidentified, fitted.model.diagnostics["next_capture"]))
    for name, why in lacking.items():
        assert found[name].why.startswith(why)
        assert not fitted.model.parameters[name].identified
        assert f"  {name}: {why}" in said
    # And what would tell is a command that loadgen takes, of prompts that the engine does.
    command = re.search(r"^  loadgen (.*)$", said, re.MULTILINE)
    assert command is not None
    config = parse_config(shlex.split(command[1]))
    assert (config.pattern, str(config.prompt_tokens)) == ("calibration", "64:10000")


def test_the_designed_load_leaves_nothing_open(planned: ModuleType, tmp_path: Path) -> None:
    fitted = fit(planned, tmp_path, "--pattern calibration --number 78 --seed 5")
    assert fitted.unidentified == []
    assert fitted.model.diagnostics["next_capture"] is None
    held = Coverage(**fitted.model.diagnostics["coverage"])
    assert [lack(name, held) for name in fitted.model.parameters] == [None] * 8
    assert held.answers_at_once >= 7  # of 8, nearly at once
    assert held.longest_cold > 6000
    assert f"\n{held}\n" in describe_fit(fitted.model)


@pytest.mark.parametrize(
    ("engine", "prompts", "parallel"),
    [
        (EngineConfig(num_gpu_blocks=10_000, max_num_batched_tokens=2048), "64:10000", 16),
        (EngineConfig(num_gpu_blocks=100_000, max_num_batched_tokens=8192, max_num_seqs=4), "64:40000", 4),
        (EngineConfig(num_gpu_blocks=10_000, max_model_len=4096), "64:2700", 16),
        (EngineConfig(num_gpu_blocks=1000, max_num_seqs=1), "64:5300", 2),
        (EngineConfig(num_gpu_blocks=10_000, max_model_len=128), "10:85", 16),
    ],
)
def test_the_next_capture_is_one_that_the_engine_can_take(engine: EngineConfig, prompts: str, parallel: int) -> None:
    command = next_capture(engine)
    config = parse_config(shlex.split(command.removeprefix("loadgen ")))
    assert (str(config.prompt_tokens), config.parallel) == (prompts, parallel)


def test_too_little_to_fit_says_what_to_send() -> None:
    for uncached, gaps in ((np.full(3, 100.0), 50), (np.geomspace(64, 9000, 40), 3), (np.full(40, 700.0), 500)):
        with pytest.raises(InputError, match="loadgen --pattern calibration"):
            require_enough(uncached, gaps)


def test_what_to_capture_next_says_if_the_range_is_missing() -> None:
    """One parameter without the range for it is enough to say so."""
    hidden = Unidentified("t0_ms", "noise", "more", range_missing=False)
    for found, line in (
        ([hidden], "The captures have the range"),
        ([hidden, Unidentified("a", "b", "c")], "The missing"),
    ):
        said = list(describe_open(found, "loadgen"))
        assert said[len(found) + 1].startswith(line)
