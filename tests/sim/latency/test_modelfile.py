import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sim.latency.modelfile import Model, default_model, load_model, make_model, model_digest, save_model
from sim.latency.noise import LEVELS, Noise
from sim.latency.terms import NUM_STEP_TERMS, REPEATED_KV_TOKENS, REST_MS, STEP_TERMS, decode_kv_tokens
from tests.sim.oracles.readable.noise import StepNoise
from tests.sim.oracles.readable.request import Request
from tests.sim.oracles.readable.rows import begin_row, count_decodes, row_ms, step_row
from tests.sim.oracles.readable.scheduler import Scheduled, Step
from tracefile import InputError


def test_a_model_survives_its_file(tmp_path: Path) -> None:
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
def test_a_malformed_model_is_refused_by_file_and_field(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=named) as refusal:
        load_model(path)
    assert str(path) in str(refusal.value)


def test_a_step_costs_the_sum_of_its_terms() -> None:
    costs = {term.name: 2.0**-place for place, term in enumerate(STEP_TERMS)}
    row = [1.0, *(2.0 * place + 1.0 for place in range(1, len(STEP_TERMS)))]
    expected = sum(count * cost for count, cost in zip(row, costs.values(), strict=True))
    model = make_model(costs, default_model().engine)
    assert row_ms(model.costs, row) == expected
    begin_row(row)
    count_decodes(row, 7, 11, 4)
    assert row_ms(model.costs, row) == 1.0 + 7 / 8 + 7 / 16 + 4 / 32
    assert decode_kv_tokens(np.array(row)) == 11


def test_a_steps_row_by_hand() -> None:
    """Two decodes and two chunks, of a prompt of one token too, 200 ms after the step before; 6 tokens held twice."""
    decoding, deep = Request("decoding", 10, 9, [0] * 9), Request("deep", 4, 99, [0] * 99)
    chunk, tiny = Request("chunk", 50, 1, [0] * 9, arrival_ms=700.0), Request("tiny", 1, 1, [0])
    alone = Scheduled(deep, 1, 4, True)
    shares = [Scheduled(chunk, 8, 32, False), Scheduled(decoding, 1, 12, True), alone, Scheduled(tiny, 1, 0, True)]
    row = step_row(Step(shares, repeated_tokens=6), 700.0 - REST_MS)
    rested = 1 - 1 / math.e
    assert dict(zip((term.name for term in STEP_TERMS), row, strict=True)) == {
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
    assert step_row(Step([alone]), math.inf) == [1.0, 0, 0, 1.0, 4.0, 0, 0, 0, 0, 0, 0, 0]
    assert step_row(Step(), -math.inf) == [1.0] + [0.0] * (NUM_STEP_TERMS - 1)


def test_a_repeated_read_costs_as_much_as_a_first_one_where_the_model_does_not_tell() -> None:
    told = make_model({"per_kv_token_ms": 0.5, "per_repeated_kv_token_ms": 0.125}, default_model().engine)
    silent = make_model({"per_kv_token_ms": 0.5}, default_model().engine)
    assert told.costs[REPEATED_KV_TOKENS] == 0.125
    assert silent.costs[REPEATED_KV_TOKENS] == 0.5


LADDER = tuple(float(np.log(2.0)) * (place - 7) for place in range(len(LEVELS)))  # 0 at the median, level 7


def test_medians_without_a_seed() -> None:
    noise = Noise(
        step_ms=(10.0, 1000.0),
        step_log_ratio=((0.0,) * 15, (math.log(1.1),) * 15),
        frontend_log_ratio=tuple(0.1 + level for level in LADDER),
    )
    luck = StepNoise(noise, None)
    assert luck.factor(0.0, 1.0) == luck.factor(5.0, 10.0) == 1.0
    assert luck.factor(0.0, 100.0) == pytest.approx(math.sqrt(1.1))  # halfway between the knots, in the log
    assert luck.factor(0.0, 1000.0) == luck.factor(0.0, 1e6) == pytest.approx(1.1)
    assert noise.frontend_factors(None, ["a", "b"]).tolist() == pytest.approx([math.exp(0.1)] * 2)


def test_a_draw_depends_on_the_seed_and_the_steps_number_only() -> None:
    noise = Noise(step_log_ratio=(LADDER,), frontend_log_ratio=LADDER)

    def factors(seed: int, *, step_ms: float = 7.0) -> list[float]:
        luck = StepNoise(noise, seed)
        return [luck.factor(step_ms * step, step_ms) for step in range(5)]

    assert factors(1) == factors(1) == factors(1, step_ms=9.0)
    assert factors(1) != factors(2)
    alone, among = noise.frontend_factors(1, ["a"]), noise.frontend_factors(1, ["b", "a"])
    assert alone[0] == among[1] != among[0]
    assert alone[0] != noise.frontend_factors(2, ["a"])[0]


def test_draws_follow_the_tables() -> None:
    noise = Noise(step_ms=(10.0, 400.0), step_log_ratio=(LADDER, (0.0,) * 15), frontend_log_ratio=LADDER)
    luck = StepNoise(noise, 7)
    steps = np.log([luck.factor(0.0, 10.0) for _ in range(4000)])
    frontends = np.log(noise.frontend_factors(7, [f"request {number}" for number in range(4000)]))
    for level, value in ((0.1, LADDER[3]), (0.5, 0.0), (0.8, LADDER[10])):
        assert np.quantile(steps, level) == pytest.approx(value, abs=0.15)
        assert np.quantile(frontends, level) == pytest.approx(value, abs=0.15)
    assert luck.factor(0.0, 400.0) == 1.0  # a long step hardly varies


def test_a_mood_lasts_and_wears_off() -> None:
    noise = Noise(step_log_ratio=(LADDER,), autocorrelated_share=0.6, correlation_time_ms=1000.0)
    luck = StepNoise(noise, 5)
    logs = np.log([luck.factor(100.0 * step, 100.0) for step in range(20_000)])

    def correlation(steps: int) -> float:
        return float(np.corrcoef(logs[:-steps], logs[steps:])[0, 1])

    # The ladder is near linear in its normals, so that plain correlations are near theirs.
    for steps in (1, 10, 60):
        assert correlation(steps) == pytest.approx(0.6 * math.exp(-steps / 10), abs=0.05)


def test_model_json_has_no_field_that_a_reader_must_guess() -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(default_model()))
    assert set(decoded) == set(Model.__struct_fields__)
    assert all(parameter["unit"] for parameter in decoded["parameters"].values())
