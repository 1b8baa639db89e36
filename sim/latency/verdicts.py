"""Verdicts of ``sim validate`` on a model: kept in a file beside its model.json, and told by every forecast of it.

They are no part of model.json: its digest names the model in its predictions, and stays when the model is judged.
"""

import sys
from pathlib import Path

import msgspec

from measure.thresholds import TOO_UNCERTAIN
from measure.wording import listed
from sim.latency.modelfile import Model, model_digest
from tracefile.records.decoding import NOT_JSON
from tracefile.records.encoding import encode_named
from tracefile.records.schema import Meta


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Gates of one validation of a model."""

    model_digest: str
    trace: str
    trace_digest: str
    engine: dict[str, str]
    """Engine and served model of the trace, as far as its header tells them."""
    gates: int
    """Gates that were tested."""
    failed: list[str]
    uncertain: list[str] = []
    untested: list[str] = []
    passed: list[str] = []

    def __str__(self) -> str:
        outcome = f"passed all {self.gates} gates" + (f", {listed(self.passed)}" if self.passed else "")
        if self.failed or self.uncertain:
            open_ones = f"left open, {TOO_UNCERTAIN}, {listed(self.uncertain)}"
            failed = f"failed {listed(self.failed)}"
            outcome = " and ".join([*([failed] if self.failed else []), *([open_ones] if self.uncertain else [])])
        return f"{outcome} (not tested: {listed(self.untested)})" if self.untested else outcome


def verdicts_path(model: Path) -> Path:
    return model.with_name(model.name + ".validations.jsonl")


def engine_named(meta: Meta) -> dict[str, str]:
    engine = meta.engine
    told = {"name": engine and engine.name, "version": engine and engine.version, "model": meta.model}
    return {name: value for name, value in told.items() if value}


def keep_verdict(model: Path, verdict: Verdict) -> None:
    """Append a verdict; a folder that cannot be written costs a line on stderr, not the validation."""
    path = verdicts_path(model)
    try:
        with path.open("ab") as file:
            file.write(encode_named(verdict) + b"\n")
    except OSError as error:
        print(f"sim: {path}: {error.strerror}; forecasts of this model cannot tell its verdict", file=sys.stderr)


def read_verdicts(path: Path, model: Model) -> list[Verdict]:
    """Return the verdicts on this very model, the oldest first; a line that is none is passed over."""
    try:
        lines = verdicts_path(path).read_bytes().splitlines()
    except OSError:
        return []
    found, digest = [], model_digest(model)
    for line in lines:
        try:
            verdict = msgspec.json.decode(line, type=Verdict)
        except NOT_JSON:
            continue
        if verdict.model_digest == digest:
            found.append(verdict)
    return found


def verdict_sentence(path: Path, model: Model, trace_digest: str, meta: Meta) -> str:
    """Say in one line how the model of ``path`` did in ``sim validate`` on this trace, or on its engine."""
    known, engine = read_verdicts(path, model), engine_named(meta)
    here = [one for one in known if one.trace_digest == trace_digest]
    if here:
        return f"in sim validate on this trace this model {here[-1]}"
    alike = [one for one in known if engine and one.engine == engine]
    if alike:
        return f"not validated on this trace; on {alike[-1].trace}, of the same engine, this model {alike[-1]}"
    if known:
        return f"not validated on this engine; on {known[-1].trace} this model {known[-1]}"
    return "this model was never validated: sim validate tells how far to trust its forecasts"
