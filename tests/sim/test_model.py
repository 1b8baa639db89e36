import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sim.features import STEP_TERMS, decode_row
from sim.latency import StepModel
from sim.model import Model, default_model, engine_with, load_model, model_digest, save_model
from sim.noise import LEVELS, Noise, RequestNoise
from tracefile import InputError


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    model = default_model()
    save_model(model, tmp_path / "model.json")
    assert load_model(tmp_path / "model.json") == model
    assert model_digest(load_model(tmp_path / "model.json")) == model_digest(model)
    assert b'"schema": "kvtape-model/1"' in (tmp_path / "model.json").read_bytes()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not JSON"),
        (b"[]", "Expected `object`"),
        (b'{"schema": "kvtape-model/9", "parameters": {}, "engine": {"num_gpu_blocks": 9}}', r"\$\.schema"),
        (b'{"parameters": {}}', "engine"),
        (b'{"parameters": {"t1_ms": {"value": 1, "unit": ""}}, "engine": {"num_gpu_blocks": 9}}', "t1_ms"),
        (b'{"parameters": {"t0_ms": {"value": -1, "unit": ""}}, "engine": {"num_gpu_blocks": 9}}', "-1"),
        (b'{"parameters": {}, "engine": {"num_gpu_blocks": 1}}', "num_gpu_blocks: 1"),
        (b'{"parameters": {}, "engine": {"num_gpu_blocks": 9}, "noise": {"itl_log_ratio": [0]}}', "noise"),
        (b'{"parameters": {}, "engine": {"num_gpu_blocks": 9}, "draws": [[1.0]]}', r"draws\[0\]: 1 numbers"),
        (
            b'{"parameters": {"f0_ms": {"value": 1, "unit": ""}}, "engine": {"num_gpu_blocks": 9}, "draws": [[-1]]}',
            "0 or",
        ),
        (b'{"parameters": {}, "engine": {"num_gpu_blocks": 9}, "drift_log_sd": -0.1}', "drift_log_sd: -0.1"),
    ],
)
def test_a_malformed_model_is_refused_by_file_and_field(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=named) as refusal:
        load_model(path)
    assert str(path) in str(refusal.value)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_model(tmp_path / "absent.json")


def test_overrides_leave_what_they_do_not_name() -> None:
    config = default_model().engine
    assert engine_with(config, {"num_gpu_blocks": 7, "block_size": None}).num_gpu_blocks == 7
    assert engine_with(config, {"num_gpu_blocks": 7, "block_size": None}).block_size == config.block_size


def test_a_step_costs_the_sum_of_its_terms() -> None:
    costs = {term.name: 2.0**-place for place, term in enumerate(STEP_TERMS)}
    row = (1.0, 3, 5.0, 7, 11, 13, 17, 19.0, 1.0)
    expected = sum(count * cost for count, cost in zip(row, costs.values(), strict=True))
    assert StepModel(**costs).row_ms(row) == expected
    assert StepModel(**costs).row_ms(decode_row(7, 11)) == 1.0 + 7 / 8 + 11 / 16


LADDER = tuple(float(np.log(2.0)) * (place - 7) for place in range(len(LEVELS)))  # 0 at the median, level 7


def test_medians_without_a_seed() -> None:
    noise = Noise(ttft_tokens=(0.0, 100.0), ttft_log_ratio=((0.0,) * 15, (math.log(1.1),) * 15), itl_log_ratio=LADDER)
    medians = RequestNoise(noise, None, "a")
    assert medians.ttft_factor(0) == pytest.approx(1.0)
    assert medians.ttft_factor(100) == medians.ttft_factor(10**6) == pytest.approx(1.1)
    assert 1.0 < medians.ttft_factor(9) < 1.1
    assert medians.itl_factors(3) == pytest.approx([1.0, 1.0, 1.0])


def test_a_draw_depends_on_seed_request_and_place_only() -> None:
    noise = Noise(itl_log_ratio=LADDER, itl_request_correlation=0.3, ttft_itl_correlation=0.5)
    few, many = RequestNoise(noise, 1, "a").itl_factors(5), RequestNoise(noise, 1, "a").itl_factors(50)
    assert list(few) == list(many[:5])
    assert list(few) != list(RequestNoise(noise, 2, "a").itl_factors(5))
    assert list(few) != list(RequestNoise(noise, 1, "b").itl_factors(5))


def test_draws_follow_the_table_and_its_correlations() -> None:
    noise = Noise(ttft_log_ratio=(LADDER,), itl_log_ratio=LADDER, itl_request_correlation=0.5, ttft_itl_correlation=0.8)
    draws = [RequestNoise(noise, 7, f"request {number}") for number in range(4000)]
    ttfts = np.log([draw.ttft_factor(50) for draw in draws])
    gaps = np.log([draw.itl_factors(2) for draw in draws])
    for level, value in ((0.1, LADDER[3]), (0.5, 0.0), (0.8, LADDER[10])):
        assert np.quantile(ttfts, level) == pytest.approx(value, abs=0.15)
        assert np.quantile(gaps[:, 1], level) == pytest.approx(value, abs=0.15)
    # The ladder is near linear in z, so that plain correlations are near the copula's.
    assert np.corrcoef(gaps[:, 0], gaps[:, 1])[0, 1] == pytest.approx(0.5, abs=0.06)
    assert np.corrcoef(ttfts, gaps[:, 0])[0, 1] == pytest.approx(0.8 * math.sqrt(0.5), abs=0.06)


def test_model_json_has_no_field_that_a_reader_must_guess() -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(default_model()))
    assert set(decoded) == set(Model.__struct_fields__)
    assert all(parameter["unit"] for parameter in decoded["parameters"].values())
