import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from librt.vecs import vec
from mypy_extensions import i64

from sim.engine.simulation import step_noise
from sim.latency import stepcost
from sim.latency.modelfile import Model, default_model, load_model, make_model, model_digest, save_model
from sim.latency.noise import LEVELS, Noise, frontend_factors
from sim.latency.stepcost import IDLE_MS, KV_TOKENS, NUM_ROW_TERMS, NUM_STEP_TERMS, REPEATED_KV_TOKENS, StepCost
from sim.latency.terms import RECEPTION_TERMS, STEP_TERMS, TERMS
from sim.vllm.request import Request
from sim.vllm.scheduler import Share, Step
from tracefile.records.errors import InputError


def test_model_file_round_trips(tmp_path: Path) -> None:
    model = default_model()
    save_model(model, tmp_path / "model.json")
    assert load_model(tmp_path / "model.json") == model
    assert model_digest(load_model(tmp_path / "model.json")) == model_digest(model)
    assert b'"schema": "kvtape-model/2"' in (tmp_path / "model.json").read_bytes()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not JSON"),
        (
            b'{"schema": "kvtape-model/9", "parameters": {}, "engine": {"num_gpu_blocks": 9}}',
            "schema: kvtape-model/9; expected kvtape-model/2",
        ),
        (b'{"parameters": {"t0_ms": {"value": -1, "unit": ""}}, "engine": {"num_gpu_blocks": 9}}', "-1"),
    ],
)
def test_malformed_model_is_rejected_by_file_and_field(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=named) as refusal:
        load_model(path)
    assert str(path) in str(refusal.value)


def test_row_counts_are_in_term_order() -> None:
    names = (
        "STEPS PREFILL_TOKENS ATTENTION DECODES KV_TOKENS REPEATED_KV_TOKENS CHUNKS DEPTHS SQUARES PREFILL_STEPS "
        "RESTED_STEPS RESTED_DEPTHS RECEIVED RECEIVED_TOKENS DELIVERED_TOKENS"
    )
    assert [getattr(stepcost, name) for name in names.split()] == list(range(len(TERMS)))
    assert (len(STEP_TERMS), len(TERMS)) == (stepcost.NUM_STEP_TERMS, stepcost.NUM_TERMS)
    assert len(STEP_TERMS) + len(RECEPTION_TERMS) == stepcost.NUM_ROW_TERMS


def test_step_cost_is_the_sum_of_all_terms() -> None:
    costs = {term.name: 2.0**-position for position, term in enumerate(STEP_TERMS)}
    counts = [1.0, *(2.0 * position + 1.0 for position in range(1, len(STEP_TERMS)))]
    cost = StepCost(list(make_model(costs, default_model().engine).costs))
    for position, count in enumerate(counts):
        cost.row[position] = count
    assert cost.step_ms() == sum(count * each for count, each in zip(counts, costs.values(), strict=True))
    cost.count_decode_step(7, 11, 4)
    assert cost.decode_step_ms(7, 11, 4) == cost.step_ms() == 1.0 + 7 / 8 + 7 / 16 + 4 / 32
    assert cost.row[KV_TOKENS] + cost.row[REPEATED_KV_TOKENS] == 11


def composed(shares: Sequence[Share], repeated_tokens: int = 0) -> Step:
    step = Step()
    step.shares, step.count, step.repeated_tokens = list(shares), len(shares), repeated_tokens
    return step


def test_step_counts_by_hand() -> None:
    """Two decodes and two chunks, of a prompt of one token too, 200 ms after the step before; 6 tokens held twice."""
    keys, cost = vec[i64](), StepCost([0.0] * len(TERMS))
    decoding, deep = Request("decoding", 10, 9, keys), Request("deep", 4, 99, keys)
    chunk, tiny = Request("chunk", 50, 1, keys, arrival_ms=700.0), Request("tiny", 1, 1, keys)
    alone = Share(deep, 1, 4, samples=True)
    shares = [Share(chunk, 8, 32, samples=False), Share(decoding, 1, 12, samples=True), alone]
    cost.count_step(composed([*shares, Share(tiny, 1, 0, samples=True)], 6), 700.0 - IDLE_MS)
    rested = 1 - 1 / math.e
    assert dict(zip((term.name for term in STEP_TERMS), list(cost.row)[:NUM_STEP_TERMS], strict=True)) == {
        "t0_ms": 1.0,
        "per_prefill_token_ms": 8 + 1,
        "per_attention_token2_ms": 8 * 32 + 8 * 8 / 2 + 1 / 2,
        "per_decode_ms": 2.0,
        "per_kv_token_ms": 12 + 4 - 6,
        "per_repeated_kv_token_ms": 6.0,
        "per_prefill_chunk_ms": 2.0,
        "per_prefill_depth_ms": 32.0,
        "per_chunk_square_ms": 8 * 8 / 2 + 1 / 2,
        "prefill_step_ms": 1.0,
        "rested_step_ms": pytest.approx(rested),
        "per_rested_depth_ms": pytest.approx(32 * rested),
    }
    # A decode alone, after none: no chunk, no rest. No request at all is a step that does nothing.
    cost.count_step(composed([alone]), math.inf)
    assert list(cost.row) == [1.0, 0, 0, 1.0, 4.0] + [0.0] * (NUM_ROW_TERMS - 5)
    cost.count_step(composed([]), -math.inf)
    assert list(cost.row) == [1.0] + [0.0] * (NUM_ROW_TERMS - 1)


def test_a_repeated_kv_read_defaults_to_the_cost_of_a_first_read() -> None:
    output = make_model({"per_kv_token_ms": 0.5, "per_repeated_kv_token_ms": 0.125}, default_model().engine)
    silent = make_model({"per_kv_token_ms": 0.5}, default_model().engine)
    assert output.costs[REPEATED_KV_TOKENS] == 0.125
    assert silent.costs[REPEATED_KV_TOKENS] == 0.5


LADDER = tuple(float(np.log(2.0)) * (position - 7) for position in range(len(LEVELS)))  # 0 at the median, level 7


def test_medians_without_a_seed() -> None:
    noise = Noise(
        step_ms=(10.0, 1000.0),
        step_log_ratio=((0.0,) * 15, (math.log(1.1),) * 15),
        frontend_log_ratio=tuple(0.1 + level for level in LADDER),
    )
    luck = step_noise(noise, None)
    assert luck.factor(0.0, 1.0) == luck.factor(5.0, 10.0) == 1.0
    assert luck.factor(0.0, 100.0) == pytest.approx(math.sqrt(1.1))  # halfway between the knots, in the log
    assert luck.factor(0.0, 1000.0) == luck.factor(0.0, 1e6) == pytest.approx(1.1)
    assert frontend_factors(noise, None, ["a", "b"]).tolist() == pytest.approx([math.exp(0.1)] * 2)


def test_noise_depends_on_seed_and_step_number() -> None:
    noise = Noise(step_log_ratio=(LADDER,), frontend_log_ratio=LADDER)

    def factors(seed: int, *, step_ms: float = 7.0) -> list[float]:
        luck = step_noise(noise, seed)
        return [luck.factor(step_ms * step, step_ms) for step in range(5)]

    assert factors(1) == factors(1) == factors(1, step_ms=9.0)
    assert factors(1) != factors(2)
    alone, among = frontend_factors(noise, 1, ["a"]), frontend_factors(noise, 1, ["b", "a"])
    assert alone[0] == among[1] != among[0]
    assert alone[0] != frontend_factors(noise, 2, ["a"])[0]


def test_draws_follow_the_tables() -> None:
    noise = Noise(step_ms=(10.0, 400.0), step_log_ratio=(LADDER, (0.0,) * 15), frontend_log_ratio=LADDER)
    luck = step_noise(noise, 7)
    steps = np.log([luck.factor(0.0, 10.0) for _ in range(4000)])
    frontends = np.log(frontend_factors(noise, 7, [f"request {number}" for number in range(4000)]))
    for level, value in ((0.1, LADDER[3]), (0.5, 0.0), (0.8, LADDER[10])):
        assert np.quantile(steps, level) == pytest.approx(value, abs=0.15)
        assert np.quantile(frontends, level) == pytest.approx(value, abs=0.15)
    assert luck.factor(0.0, 400.0) == 1.0  # a long step hardly varies


def test_noise_autocorrelation_decays() -> None:
    noise = Noise(step_log_ratio=(LADDER,), autocorrelated_share=0.6, correlation_time_ms=1000.0)
    luck = step_noise(noise, 5)
    logs = np.log([luck.factor(100.0 * step, 100.0) for step in range(20_000)])

    def correlation(steps: int) -> float:
        return float(np.corrcoef(logs[:-steps], logs[steps:])[0, 1])

    # The ladder is near linear in its normals, so that plain correlations are near theirs.
    for steps in (1, 10, 60):
        assert correlation(steps) == pytest.approx(0.6 * math.exp(-steps / 10), abs=0.05)


def test_model_json_fields_are_documented() -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(default_model()))
    assert set(decoded) == set(Model.__struct_fields__)
    assert all(parameter["unit"] for parameter in decoded["parameters"].values())
