"""model.json: what a fit learnt of an engine, how sure it is, and what it learnt it from."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sim.latency.clocks import FrontendModel, FrontendPlacement, StepModel
from sim.latency.noise import Noise
from sim.latency.terms import FRONTEND_TERMS, STEP_TERMS, TERMS
from sim.vllm.config import EngineConfig
from tracefile.records.errors import InputError

MODEL_SCHEMA: Literal["kvtape-model/1"] = "kvtape-model/1"


class Parameter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One parameter's value and how well the captures pin it down."""

    value: float
    unit: str
    low: float | None = None
    """Lower end of the bootstrap interval over sessions (2.5 %). Null: not fitted, or no bootstrap."""
    high: float | None = None
    """Upper end (97.5 %)."""
    identified: bool = True
    """False: the captures hold nothing that depends on it enough; the value is a placeholder."""
    note: str | None = None
    """Why it is not identified, or where the value is from."""


class FitTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace the model was fitted on; it must never be the trace that judges the model."""

    digest: str
    """``trace_digest``: SHA-256 over the record lines."""
    name: str
    """The file's name, for people."""
    requests: int


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """A simpler predictor of TTFT and its errors on the same data. The yardstick: worse than this is worthless."""

    formula: str
    intercept_ms: float | None = None
    """TTFT of a request with nothing to compute. Null: written before this was kept."""
    per_uncached_token_ms: float = 0.0
    median_abs_error: float
    """Median over requests of |predicted − observed| / observed."""
    p90_abs_error: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted engine. Times in ms, tokens counted, errors as fractions of the observed value."""

    schema: Literal["kvtape-model/1"] = MODEL_SCHEMA
    parameters: dict[str, Parameter]
    """By the names of ``features.TERMS``; an absent one is 0."""
    engine: EngineConfig
    """Settings under which it was fitted; ``sim run`` takes them unless told otherwise."""
    frontend_placement: FrontendPlacement = "parallel"
    noise: Noise = msgspec.field(default_factory=Noise)
    draws: list[list[float]] = []
    """Joint draws of the parameters: a row per draw, in the order of ``parameters``. From the bootstrap by session, so
    that they say together how sure the fit is. Empty: a point, nothing is known of its uncertainty."""
    drift_log_sd: float = 0.0
    """Standard deviation of log(speed) of a capture to come, beyond what the parameters explain: how much faster or
    slower the engine may be on another day."""
    drift_freedom: int = 0
    """Degrees of freedom that it is known with: few captures tell little of it, and Student's t of that. 0: it is known
    exactly."""
    model_name: str | None = None
    """The served model's name, from the traces. Null: they do not say."""
    fitted_on: list[FitTrace] = []
    """Empty: not fitted, but written down."""
    diagnostics: dict[str, Any] = {}
    """How the fit went: see docs/model.md."""
    baselines: dict[str, Baseline] = {}

    def __post_init__(self) -> None:
        known = {term.name for term in TERMS}
        for name, parameter in self.parameters.items():
            if name not in known:
                raise InputError(f"parameters.{name}: unknown; expected some of {', '.join(sorted(known))}")
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
    def step(self) -> StepModel:
        """The step times."""
        return StepModel(**{term.name: self._value(term.name) for term in STEP_TERMS})

    @property
    def frontend(self) -> FrontendModel:
        """The front end's times."""
        values = {term.name: self._value(term.name) for term in FRONTEND_TERMS}
        return FrontendModel(placement=self.frontend_placement, **values)

    def vector(self) -> npt.NDArray[np.float64]:
        """The parameters in the order of ``features.TERMS``."""
        return np.array([self._value(term.name) for term in TERMS])

    @property
    def fit_digests(self) -> list[str]:
        """Digests of the traces it was fitted on."""
        return [trace.digest for trace in self.fitted_on]

    def _value(self, name: str) -> float:
        parameter = self.parameters.get(name)
        return 0.0 if parameter is None else parameter.value

    def refuse_fit_traces(self, digest: str, path: str | os.PathLike[str]) -> None:
        """Raise InputError if the trace of this digest is one the model was fitted on."""
        for trace in self.fitted_on:
            if trace.digest == digest:
                raise InputError(
                    f"{os.fspath(path)}: the model was fitted on this very trace ({trace.name}, digest "
                    f"{digest[:12]}…); expected a trace it has not seen"
                )


def engine_with(config: EngineConfig, overrides: Mapping[str, Any]) -> EngineConfig:
    """``config`` with those of ``overrides`` that are not None."""
    return replace(config, **{name: value for name, value in overrides.items() if value is not None})


def make_model(step: StepModel, frontend: FrontendModel, engine: EngineConfig, noise: Noise | None = None) -> Model:
    """A model that was written down, not fitted."""
    values = [getattr(step, term.name) for term in STEP_TERMS] + [getattr(frontend, t.name) for t in FRONTEND_TERMS]
    return Model(
        parameters={
            term.name: Parameter(value=value, unit=term.unit, note="given, not fitted")
            for term, value in zip(TERMS, values, strict=True)
            if value != 0.0
        },
        engine=engine,
        frontend_placement=frontend.placement,
        noise=noise or Noise(),
    )


def default_model() -> Model:
    """A small CPU engine: the parameters once fitted on vLLM serving a 128 × 2 model on one core."""
    return make_model(
        StepModel(
            t0_ms=4.3,
            per_prefill_token_ms=0.013,
            per_attention_token2_ms=1.1e-5,
            per_decode_ms=0.99,
            per_kv_token_ms=3e-5,
        ),
        FrontendModel(f0_ms=7.0, f1_ms_per_prompt_token=0.0022),
        EngineConfig(
            num_gpu_blocks=4096,
            block_size=32,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            max_model_len=16384,
            async_scheduling=False,
        ),
    )


def load_model(path: str | os.PathLike[str]) -> Model:
    """Read a model.json. Raises InputError naming the file and the field."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: {error.strerror}; expected a model.json") from None
    try:
        return msgspec.json.decode(data, type=Model)
    except msgspec.ValidationError as error:
        raise InputError(f"{os.fspath(path)}: {error}") from None
    except msgspec.DecodeError as error:
        raise InputError(f"{os.fspath(path)}: not JSON ({error}); expected a model.json") from None
    except InputError as error:
        raise InputError(f"{os.fspath(path)}: {error}") from None


def encode_model(model: Model) -> bytes:
    """The file's bytes: the same model gives the same ones."""
    return msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n"


def save_model(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model.json, replacing what was there at once or not at all."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_bytes(encode_model(model))
        partial.replace(target)
    except OSError as error:
        raise InputError(f"{target}: {error.strerror}; expected a place to write model.json") from None


def model_digest(model: Model) -> str:
    """Hex SHA-256 of the model's file: names the model in what it predicted."""
    return hashlib.sha256(encode_model(model)).hexdigest()
