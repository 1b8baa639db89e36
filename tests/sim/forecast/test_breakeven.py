"""Bandwidth from which a transfer from the host's memory is faster than computing its tokens."""

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.engine.tiers import TierTraffic
from sim.forecast.captured import Load, plan
from sim.forecast.ensemble import members
from sim.forecast.scenarios import Scenario
from sim.forecast.whatif import break_even_gb_per_s, tiers_said
from sim.latency.modelfile import load_model, make_model
from sim.vllm.config import EngineConfig
from tests.sim.forecast.test_scenarios import captured
from tracefile import trace_digest

ROOT = Path(__file__).parents[3]
CAPTURE = ROOT / "data" / "captures" / "256x4" / "calibration-1.jsonl.zst"
COSTS = {"t0_ms": 4.0, "per_prefill_token_ms": 0.1, "per_attention_token2_ms": 0.0002}
CONFIG = EngineConfig(num_gpu_blocks=999, block_size=32)
TRAFFIC: dict[str, Any] = dict.fromkeys(TierTraffic.__dataclass_fields__, 0) | {"loads": 3, "loaded_tokens": 3_000}


def planned(synthetic: ModuleType, **more: Any) -> Load:
    """A megabyte of KV a token; 20 ms for each transfer to begin."""
    layout = {"host_blocks": 999, "kv_bytes_per_token": 1_000_000, "host_latency_ms": 20.0}
    there = captured(synthetic.calibration(0, prompts=2, mixed=0), paced=False)
    return plan(there, Scenario({}, deployment=layout | more))


@pytest.fixture
def load(synthetic: ModuleType) -> Load:
    return planned(synthetic)


@pytest.mark.parametrize(
    ("tokens", "gb_per_s"),
    [
        (1_000, 1_000 / (100.0 + 100.0 - 20.0)),  # a gigabyte in what is left of 0.1 ms a token and 0.0001 ms a square
        (500, 500 / (50.0 + 25.0 - 20.0)),
        (100, np.inf),  # computed in 11 ms
    ],
)
def test_a_transfer_is_as_fast_as_computing_its_tokens(load: Load, tokens: int, gb_per_s: float) -> None:
    found = break_even_gb_per_s(load, [make_model(COSTS, CONFIG)], tokens)
    assert found == pytest.approx([gb_per_s])


def test_the_interval_is_that_of_the_members(load: Load) -> None:
    """Four draws of the token's cost, each the half of the members: 130, 180, 230 and 280 ms are left of a gigabyte."""
    model = make_model(COSTS, CONFIG)
    place = list(model.parameters).index("per_prefill_token_ms")
    row = [one.value for one in model.parameters.values()]
    draws = [[*row[:place], cost, *row[place + 1 :]] for cost in (0.05, 0.1, 0.15, 0.2)]
    drawn = members(msgspec.structs.replace(model, draws=draws), 8, 0)
    said = tiers_said(load, TierTraffic(**TRAFFIC), drawn)
    assert said is not None
    assert said.mean_load_tokens == 1_000.0
    span = said.break_even_gb_per_s
    assert span is not None
    assert (span.low, span.middle, span.high) == pytest.approx((1_000 / 280, 1_000 / 230, 1_000 / 130), rel=1e-6)


def test_a_fitted_model_gives_an_interval(load: Load) -> None:
    """Of ``--bootstrap 20`` on a committed capture: 2,000 tokens take 255 + 369 ms, drawn and drifting."""
    model = load_model(ROOT / "tests" / "sim" / "data" / "fitted_256x4.json")
    assert [one.digest for one in model.fitted_on] == [trace_digest(CAPTURE)]
    own = break_even_gb_per_s(load, [model], 2_000)
    assert own == pytest.approx([2_000 / (2_000 * 0.127575 + 2_000**2 / 2 * 0.000184548 - 20.0)], rel=1e-4)
    drawn = members(model, 32, 0)
    costs = [(one.cost_by_name["per_prefill_token_ms"], one.cost_by_name["per_attention_token2_ms"]) for one in drawn]
    by_member = sorted(2_000 / (2_000 * token + 2_000**2 / 2 * token2 - 20.0) for token, token2 in costs)
    said = tiers_said(load, TierTraffic(**TRAFFIC | {"loaded_tokens": 6_000}), drawn)
    assert said is not None
    span = said.break_even_gb_per_s
    assert span is not None
    assert (span.low, span.middle, span.high) == pytest.approx((by_member[0], by_member[15], by_member[31]), rel=1e-6)
    assert (span.low, span.middle, span.high) == pytest.approx((2.59, 3.32, 4.16), abs=0.005)


def test_nothing_loaded_has_no_break_even(load: Load) -> None:
    nothing = TierTraffic(**TRAFFIC | {"loads": 0, "loaded_tokens": 0})
    said = tiers_said(load, nothing, [make_model(COSTS, CONFIG)])
    assert said is not None
    assert said.break_even_gb_per_s is None
