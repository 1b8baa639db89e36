"""Trust in a latency model: verdicts of ``sim validate``, the error on the capture itself, the engine of the fit.

Every forecast reports them. Verdicts are stored in a file beside model.json, not in it: the digest of model.json
identifies the model in its predictions and must not change with a validation.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from measure.number_format import listed, share, signed_percent
from measure.thresholds import BELOW_SATURATION, IN_SATURATION, TOO_UNCERTAIN
from sim.latency.modelfile import Model, engine_with, model_digest
from sim.vllm.config import EngineConfig
from tracefile.records.decoding import NOT_JSON
from tracefile.records.encoding import encode_named
from tracefile.records.schema import Meta


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Gates of a validation of a latency model."""

    model_digest: str
    trace: str
    trace_digest: str
    engine: dict[str, str]
    """Engine and served model from the header of the trace."""
    gates: int
    """Number of tested gates."""
    failed: list[str]
    uncertain: list[str] = []
    untested: list[str] = []
    passed: list[str] = []
    errors: dict[str, float] = {}
    """Signed error of TTFT over all requests, by level."""

    def __str__(self) -> str:
        if not self.gates:
            return f"compared without gates, TTFT of all requests off by {_errors_text(self.errors)}"
        outcome = f"passed all {self.gates} gates" + (f", {listed(self.passed)}" if self.passed else "")
        if self.failed or self.uncertain:
            states = {"failed": self.failed, "too uncertain on": self.uncertain}
            outcome = "; ".join(f"{state} {listed(names)}" for state, names in states.items() if names)
        return f"{outcome} (not tested: {listed(self.untested)})" if self.untested else outcome


def verdicts_path(model: Path) -> Path:
    return model.with_name(model.name + ".validations.jsonl")


def engine_named(meta: Meta) -> dict[str, str]:
    engine = meta.engine
    fields = {"name": engine and engine.name, "version": engine and engine.version, "model": meta.model}
    return {name: value for name, value in fields.items() if value}


def keep_verdict(model: Path, verdict: Verdict) -> None:
    """Append a verdict. A folder that is not writable costs a warning, not the validation."""
    path = verdicts_path(model)
    try:
        with path.open("ab") as file:
            file.write(encode_named(verdict) + b"\n")
    except OSError as error:
        print(f"sim: {path}: {error.strerror}; forecasts of this model cannot report the verdict", file=sys.stderr)


def read_verdicts(path: Path, model: Model) -> list[Verdict]:
    """Return the verdicts on this latency model, oldest first; skip malformed lines."""
    try:
        lines = verdicts_path(path).read_bytes().splitlines()
    except OSError:
        return []
    verdicts, digest = [], model_digest(model)
    for line in lines:
        try:
            verdict = msgspec.json.decode(line, type=Verdict)
        except NOT_JSON:
            continue
        if verdict.model_digest == digest:
            verdicts.append(verdict)
    return verdicts


def verdict_sentence(path: Path, model: Model, trace_digest: str, meta: Meta) -> str:
    """Return the verdict of ``sim validate`` on the latency model in a line: on this trace, else on its engine."""
    verdicts, engine = read_verdicts(path, model), engine_named(meta)
    on_trace = [verdict for verdict in verdicts if verdict.trace_digest == trace_digest]
    if on_trace:
        return f"sim validate on this trace: {on_trace[-1]}"
    on_engine = [verdict for verdict in verdicts if engine and verdict.engine == engine]
    if on_engine:
        return f"not validated on this trace; sim validate on {on_engine[-1].trace}, same engine: {on_engine[-1]}"
    if verdicts:
        return f"not validated on this engine; sim validate on {verdicts[-1].trace}: {verdicts[-1]}"
    return "the latency model was never validated: sim validate measures the error of its forecasts"


@dataclass(frozen=True, slots=True)
class Trust:
    """TTFT error of a latency model on the capture that it forecasts from."""

    sentence: str
    """Appended to the sentence of the verdict."""
    trusted: bool
    """True: the error is within the limits of the gates."""


def trust(errors: Mapping[str, float], bands: Mapping[str, float], *, saturated: bool) -> Trust:
    """Compare TTFT errors over all requests, by level, and the half widths of their bands with the gates' limits."""
    limits = IN_SATURATION if saturated else BELOW_SATURATION
    limited = [level for level in errors if level in limits]
    beyond = [level for level in limited if abs(errors[level]) > limits[level]]
    wide = {level: bands[level] for level in limited if bands[level] > limits[level]}
    sentence = f"forecast of this capture: TTFT of all requests is off by {_errors_text(errors)}"
    if beyond:
        allowed = listed([share(limits[level]) for level in beyond])
        limit = f"more than the gates' {allowed} at {listed(beyond)}"
        return Trust(f"{sentence}, {limit}: do not rely on effects of such a size", trusted=False)
    if wide:
        level = max(wide, key=lambda name: wide[name])
        band = f"± {share(wide[level])}" if wide[level] != float("inf") else "no upper end"
        end = f"within the gates' limits, but with a band of {band} at {level}: {TOO_UNCERTAIN}"
        return Trust(f"{sentence}, {end}", trusted=True)  # the members of the forecast carry this uncertainty
    return Trust(f"{sentence}, within the gates' limits", trusted=True)


def _errors_text(errors: Mapping[str, float]) -> str:
    return listed([f"{signed_percent(error)} at {level}" for level, error in errors.items()]) or "an unknown share"


def engine_differences(model: Model, meta: Meta, engine: EngineConfig | None = None) -> Iterator[str]:
    """Yield differences between the engine of a trace and the engine of the fit: name, version, scheduler settings.

    ``engine``: settings of the trace; None: from its header.
    """
    if engine is None:
        reported = {name: getattr(meta.engine, name, None) for name in EngineConfig.__dataclass_fields__}
        block_override = {} if model.engine.kv_groups is None else {"block_size": None}
        engine = engine_with(model.engine, reported | block_override)
    fitted = {"model": model.model_name, **(model.diagnostics.get("engine") or {})}
    for name, value in engine_named(meta).items():
        if fitted.get(name) not in (None, value):
            yield f"{name} {value}, fitted on {fitted[name]}"
    yield from model.other_settings(engine)


def engine_warning(model: Model, meta: Meta, engine: EngineConfig | None = None) -> Iterator[str]:
    """Yield a warning if the trace's engine differs from the engine of the latency model."""
    if other := list(engine_differences(model, meta, engine)):
        yield f"the model is of another engine than the trace ({'; '.join(other)}): its step times may not hold here"
