"""``sim calibrate``: fit a latency model to captures, then validate it on captures that the fit did not use."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_64_intdigest

from report.output import page_path
from sim.fit import fit
from sim.fit.fit import add_fit_flags, fit_and_save
from sim.forecast.validate import ValidateConfig, add_validation_flags, keep_gates, report, validate
from sim.forecast.validate import read_config as read_validation
from sim.latency.modelfile import FitTrace, Model
from sim.latency.requestsample import first_shared, request_sample
from sim.vllm.config import add_engine_flags
from tracefile import InputError, load_trace, open_trace, trace_digest
from tracefile.commandline.ending import UNCERTAIN, verdict_code
from tracefile.commandline.parser import seed
from tracefile.commandline.printing import print_json
from tracefile.records.arrays import IntArray
from tracefile.records.latenames import LateModule
from tracefile.storage.output import MODEL, check_output

if TYPE_CHECKING:
    import numpy as np

    from report.compare import comparison
    from sim.fit.fitting import FitConfig
else:  # numpy, which the flags need not
    np = LateModule("numpy")
    comparison = LateModule("report.compare.comparison")


HELD_OUT_PARTS = 3
"""One session in so many is held out where there is no capture to validate on."""


@dataclass(frozen=True, slots=True)
class CalibrateConfig:
    """Settings of ``sim calibrate``."""

    fit: "FitConfig"
    gates: tuple[ValidateConfig, ...]


EPILOG = """\
Capture three calibrations and more, before, between and after the loads: loadgen --pattern calibration --for TRACE.
Exit codes: 0 done, 1 a gate failed, 2 bad input, 3 no gate failed but one is too uncertain to say.

examples:
  sim calibrate calibration-?.jsonl.zst --against monday.jsonl.zst -o model.json --max-num-seqs 256
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="CAPTURE", help="captures of one engine, to fit")
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="GATE",
        help="captures of the same engine to validate on (default, for one CAPTURE: a third of its own sessions)",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="MODEL", help="model.json to write")
    parser.add_argument("--bootstrap", type=int, default=400, help="resamples for intervals")
    parser.add_argument("--seed", type=seed, default=0, help="seed of resampling, the ensemble and held-out sessions")
    add_fit_flags(parser)
    add_engine_flags(parser)
    add_validation_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fit, write model.json, validate, print; 1 if a gate fails, 3 if one is too uncertain."""
    html = page_path(arguments, [*arguments.traces, *arguments.against, arguments.output])
    inputs = [*arguments.traces, *arguments.against]
    check_output(arguments.output, MODEL, inputs, "--output", overwrite=arguments.overwrite)
    config = _read_config(arguments)
    to = sys.stderr if arguments.json else sys.stdout
    model = fit_and_save(config.fit, to)
    codes, found = set[int](), dict[str, comparison.Compared]()
    for gate in config.gates:
        print(f"\nvalidated on {_said(gate)}:", file=to, flush=True)
        found[str(gate.trace)] = compared = validate(gate, model if gate.judged is None else _without_whole(model))
        part = "" if gate.judged is None else "a third of "
        keep_gates(config.fit.output, model, part + gate.trace.name, compared)
        codes.add(report(replace(gate, html=html), compared))
    if arguments.json:
        print_json({name: compared.result for name, compared in found.items()})
    return verdict_code(failed=1 in codes, uncertain=UNCERTAIN in codes)


def held_out_rows(path: Path, seed: int) -> IntArray:
    """Rows of the requests of every third session of a trace, chosen by a hash of the session and ``seed``."""
    _, records = load_trace(path)
    sessions = [record.session_id or record.request_id for record in records]
    chosen = [
        xxh3_64_intdigest(session.encode(), seed=seed & 0xFFFFFFFFFFFFFFFF) % HELD_OUT_PARTS == 0
        for session in sessions
    ]
    if all(chosen) or not any(chosen):
        raise InputError(f"{path}: too few sessions to hold some out; expected more, or --against another capture")
    return np.flatnonzero(chosen)


def _read_config(arguments: argparse.Namespace) -> CalibrateConfig:
    fitted, gates = fit.read_config(arguments), arguments.against
    if not gates:
        if len(fitted.traces) > 1:
            raise InputError("--against: not given; expected a capture to validate on, or one CAPTURE alone")
        (path,) = fitted.traces
        rows = held_out_rows(path, fitted.seed)
        own = replace(read_validation(arguments, path), judged=rows)
        return CalibrateConfig(replace(fitted, held_out={path: frozenset(rows.tolist())}), (own,))
    if len(gates) > 1 and arguments.html is not None:
        raise InputError(f"--html: one page is of one capture; expected one --against, not {len(gates)}")
    _refuse_shared(fitted.traces, gates)
    return CalibrateConfig(fitted, tuple(read_validation(arguments, path) for path in gates))


def _refuse_shared(traces: Sequence[Path], gates: Sequence[Path]) -> None:
    fitted, names = {trace_digest(path) for path in traces}, dict[str, Path]()
    for path in traces:
        with open_trace(path) as reader:
            names |= dict.fromkeys(request_sample(reader), path)
    for path in gates:
        if trace_digest(path) in fitted:
            raise InputError(
                f"--against {path}: the same trace as one to fit; expected a trace that the fit does not use"
            )
        with open_trace(path) as reader:
            shared = first_shared(names, reader)
        if shared is not None:
            raise InputError(
                f"--against {path}: has requests of {names[shared]}, one to fit; expected a trace that the fit does "
                "not use"
            )


def _without_whole(model: Model) -> Model:
    """``model`` as one fitted on the sessions that were not held out, which are no file of their own."""
    fitted = [FitTrace(digest=f"{one.digest} in part", name=one.name, requests=one.requests) for one in model.fitted_on]
    return msgspec.structs.replace(model, fitted_on=fitted)


def _said(gate: ValidateConfig) -> str:
    if gate.judged is None:
        return str(gate.trace)
    return (
        f"{len(gate.judged)} requests of {gate.trace}, a third of its sessions, which the fit left out. They shared "
        "the engine's queue with the sessions of the fit: a weaker test than another capture (--against)"
    )
