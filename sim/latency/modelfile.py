"""model.json: latency parameters of an engine, their uncertainty, and the captures of the fit."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from sim.latency.fittraces import FitTrace
from sim.latency.noise import Noise
from sim.latency.terms import TERMS, FrontendPlacement
from sim.vllm.config import EngineConfig
from tracefile.records.decoding import NOT_JSON
from tracefile.records.encoding import encode_document
from tracefile.records.errors import InputError
from tracefile.storage.output import MODEL, replace_output

MODEL_SCHEMA: Literal["kvtape-model/2"] = "kvtape-model/2"
MOST_COST = 1e9
"""Limit of a parameter in a file: 11 days for one step, token or request."""
MOST_DRIFT = 5.0
"""Limit of ``drift_log_sd`` in a file: a factor of 150 between two captures."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Latency parameter and its uncertainty."""

    value: float
    unit: str
    low: float | None = None
    """Lower end of the bootstrap interval over sessions (2.5 %). Null: not fitted, or no bootstrap."""
    high: float | None = None
    """Upper end (97.5 %)."""
    identified: bool = True
    """False: the captures do not determine it; the value is a placeholder."""
    note: str | None = None
    """Reason why it is not identified, or source of the value."""


PRICED_SETTINGS: Final = ("block_size", "max_num_seqs", "max_num_batched_tokens", "async_scheduling")
"""Scheduler settings that change the cost of a step."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Latency model of a fitted engine. Times in ms; errors as fractions of the observed value."""

    schema: Literal["kvtape-model/2"] = MODEL_SCHEMA
    parameters: dict[str, Parameter]
    """Parameters by name in ``sim.latency.terms.TERMS``; absent: 0. Repeated KV reads without a parameter cost as much
    as first reads."""
    engine: EngineConfig
    """Scheduler settings of the fit: the defaults of ``sim run``."""
    frontend_placement: FrontendPlacement = "parallel"
    noise: Noise = msgspec.field(default_factory=Noise)
    draws: list[list[float]] = []
    """Joint bootstrap draws of the parameters, by session: a row per draw, in the order of ``parameters``. Empty: the
    uncertainty is unknown."""
    drift_log_sd: float = 0.0
    """Standard deviation of log(speed) between captures that the parameters do not explain: the engine's speed on
    another day."""
    drift_freedom: int = 0
    """Degrees of freedom of ``drift_log_sd``, for Student's t. 0: exact."""
    model_name: str | None = None
    """Name of the served model, from the traces. Null: not recorded."""
    fitted_on: list[FitTrace] = []
    """Captures of the fit. Empty: parameters not fitted."""
    diagnostics: dict[str, Any] = {}

    def __post_init__(self) -> None:
        names = {term.name for term in TERMS}
        for name, parameter in self.parameters.items():
            if name not in names:
                raise InputError(f"parameters.{name}: unknown; expected one of {', '.join(sorted(names))}")
            if not 0.0 <= parameter.value < float("inf"):
                raise InputError(f"parameters.{name}.value: {parameter.value}; expected a finite number, 0 or more")
        for number, draw in enumerate(self.draws):
            if len(draw) != len(self.parameters):
                raise InputError(f"draws[{number}]: {len(draw)} numbers; expected one for each of parameters")
            if not all(0.0 <= value < float("inf") for value in draw):
                raise InputError(f"draws[{number}]: {draw}; expected finite numbers, 0 or more")
        if not 0.0 <= self.drift_log_sd < float("inf"):
            raise InputError(f"drift_log_sd: {self.drift_log_sd}; expected a finite number, 0 or more")
        if self.drift_freedom < 0:
            raise InputError(f"drift_freedom: {self.drift_freedom}; expected 0 or more")

    @property
    def cost_by_name(self) -> dict[str, float]:
        return {name: parameter.value for name, parameter in self.parameters.items()}

    @property
    def costs(self) -> tuple[float, ...]:
        values = self.cost_by_name
        values.setdefault("per_repeated_kv_token_ms", values.get("per_kv_token_ms", 0.0))
        return tuple(values.get(term.name, 0.0) for term in TERMS)

    @property
    def fit_digests(self) -> list[str]:
        return [trace.digest for trace in self.fitted_on]

    def other_settings(self, engine: EngineConfig) -> Iterator[str]:
        """Yield scheduler settings that change the cost of a step and differ from the fit; not the KV cache size."""
        for name in PRICED_SETTINGS:
            value, fitted = getattr(engine, name), getattr(self.engine, name)
            if value != fitted:
                yield f"{name} {value}, fitted under {fitted}"


def engine_with(config: EngineConfig, overrides: Mapping[str, Any]) -> EngineConfig:
    return replace(config, **{name: value for name, value in overrides.items() if value is not None})


def make_model(
    costs: Mapping[str, float],
    engine: EngineConfig,
    noise: Noise | None = None,
    placement: FrontendPlacement = "parallel",
) -> Model:
    """Return a latency model that is not fitted; ``costs``: ms per count, by name in ``TERMS``."""
    units = {term.name: term.unit for term in TERMS}
    return Model(
        parameters={
            name: Parameter(value=value, unit=units[name], note="given, not fitted")
            for name, value in costs.items()
            if value != 0.0
        },
        engine=engine,
        frontend_placement=placement,
        noise=noise or Noise(),
    )


def default_model() -> Model:
    """Return the latency model of a small CPU engine, fitted on vLLM serving a 128 × 2 model on one core."""
    costs = {
        "t0_ms": 4.3,
        "per_prefill_token_ms": 0.013,
        "per_attention_token2_ms": 1.1e-5,
        "per_decode_ms": 0.99,
        "per_kv_token_ms": 3e-5,
        "frontend_base_ms": 7.0,
        "frontend_ms_per_prompt_token": 0.0022,
    }
    engine = EngineConfig(
        num_gpu_blocks=4096,
        block_size=32,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=16384,
        async_scheduling=False,
    )
    return make_model(costs, engine)


class _Header(msgspec.Struct):
    """Schema version of a model.json."""

    schema: str = MODEL_SCHEMA


def load_model(path: str | os.PathLike[str]) -> Model:
    """Read a latency model from model.json. Raises InputError naming the file and the field."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(
            f"{os.fspath(path)}: {error.strerror}; expected a model.json, as sim calibrate writes it"
        ) from None
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema != MODEL_SCHEMA:
            raise InputError(
                f"schema: {schema}; expected {MODEL_SCHEMA}: parameters were renamed, so run sim calibrate again"
            )
        return _usable(msgspec.json.decode(data, type=Model))
    except msgspec.ValidationError as error:
        raise InputError(f"{os.fspath(path)}: {error}; expected a model.json, as sim calibrate writes it") from None
    except NOT_JSON as error:
        raise InputError(f"{os.fspath(path)}: not JSON ({error}); expected a model.json") from None
    except InputError as error:
        raise InputError(f"{os.fspath(path)}: {error}") from None


def _usable(model: Model) -> Model:
    """Return the model. Raises InputError for numbers beyond any engine, which overflow in forecasts."""
    values = {f"parameters.{name}.value": value for name, value in model.cost_by_name.items()}
    values |= {f"draws[{number}]": max(draw, default=0.0) for number, draw in enumerate(model.draws)}
    for field, value in values.items():
        if value > MOST_COST:
            raise InputError(f"{field}: {value:g}; expected at most {MOST_COST:g}")
    if model.drift_log_sd > MOST_DRIFT:
        raise InputError(f"drift_log_sd: {model.drift_log_sd:g}; expected at most {MOST_DRIFT:g}")
    return model


def encode_model(model: Model) -> bytes:
    """Return the bytes of model.json; equal models have equal bytes."""
    return encode_document(model)


def save_model(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model.json; replace an existing file atomically."""
    replace_output(path, encode_model(model), MODEL, "--output")


def model_digest(model: Model) -> str:
    """Return the hex SHA-256 of model.json, which identifies the latency model in predicted traces."""
    return hashlib.sha256(encode_model(model)).hexdigest()
