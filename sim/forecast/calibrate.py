"""``sim calibrate``: fit a latency model to captures; with ``--against``, validate it on captures that the fit did not
use."""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from measure.metrics.flags import checked_bootstrap
from measure.table import table_lines
from report.output import page_path
from sim.fit import fitting, identification
from sim.fit import pace as pacing
from sim.fit.identification import Coverage
from sim.forecast.validate import keep_gates, report, validate
from sim.forecast.validate import read_config as read_validation
from sim.latency.fittraces import fit_trace, refuse_fitted
from sim.latency.modelfile import Model, load_model, save_model
from sim.vllm.config import changed_engine_flags, engine_overrides
from tracefile.commandline.exit_codes import UNCERTAIN, verdict_code
from tracefile.commandline.parser import same_named
from tracefile.commandline.printing import print_json
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace, open_trace
from tracefile.records.errors import InputError
from tracefile.storage.output import MODEL, check_output

KEPT_SHAPE = "the model keeps its terms and its engine"


def run(arguments: argparse.Namespace) -> int:
    """Fit or pace, write model.json, validate, print; 1 if a gate fails, 3 if one is too uncertain."""
    gates, inputs = arguments.against, [*arguments.traces, *arguments.against]
    if arguments.pace_from is not None or arguments.latency_model is not None:
        return _run_pace(arguments)
    if not arguments.traces:
        raise InputError("CAPTURE: none; expected captures of one engine")
    if arguments.html is not None and len(gates) != 1:
        raise InputError(f"--html: one page is of one capture; expected one --against, not {len(gates)}")
    html = page_path(arguments, [*inputs, arguments.output])
    config = read_config(arguments)
    check_output(config.output, MODEL, inputs, "--output", overwrite=arguments.overwrite)
    _refuse_shared(config.traces, gates)
    validations = [replace(read_validation(arguments, path), html=html) for path in gates]
    to = sys.stderr if arguments.json else sys.stdout
    fitted = fitting.fit_traces(config)
    save_model(fitted.model, config.output)
    print("\n".join(_described(fitted, config)), file=to)
    codes, results = set[int](), {}
    for gate in validations:
        print(f"\nvalidated on {gate.trace}:", file=to, flush=True)
        results[str(gate.trace)] = compared = validate(gate, fitted.model)
        keep_gates(config.output, fitted.model, gate.trace.name, compared)
        codes.add(report(gate, compared))
    if arguments.json:
        print_json({name: compared.result for name, compared in results.items()})
    return verdict_code(failed=1 in codes, uncertain=UNCERTAIN in codes)


def _run_pace(arguments: argparse.Namespace) -> int:
    """Scale a model by the pace of a capture."""
    paced = (arguments.pace_from, arguments.latency_model)
    if None in paced or arguments.traces or arguments.against:
        raise InputError("--pace-from: expected --pace-from CAPTURE --latency-model MODEL -o OUT, and no CAPTURE")
    if arguments.term or changed_engine_flags(arguments):
        flag = "--term" if arguments.term else changed_engine_flags(arguments)[0]
        raise InputError(f"{flag}: given with --pace-from; expected one of them: {KEPT_SHAPE}")
    check_output(arguments.output, MODEL, paced, "--output", overwrite=arguments.overwrite)
    model = pacing.paced_model(load_model(arguments.latency_model), arguments.pace_from)
    save_model(model, arguments.output)
    print(model.diagnostics["pace"]["said"], f"{arguments.output}: written", sep="\n")
    return 0


def read_config(arguments: argparse.Namespace) -> fitting.FitConfig:
    """Read the command line. Raises InputError that names the flag."""
    checked_bootstrap(arguments.bootstrap)
    terms = arguments.term
    made = {
        "traces": tuple(arguments.traces),
        "overrides": engine_overrides(arguments),
        "extra_terms": tuple(name for name in dict.fromkeys(terms) if name != "none") if terms else None,
    }
    return fitting.FitConfig(**(same_named(fitting.FitConfig, arguments) | made))


def _described(fitted: fitting.Fitted, config: fitting.FitConfig) -> Iterable[str]:
    yield describe_fit(fitted.model)
    if fitted.unidentified:
        command = fitted.model.diagnostics["next_capture"]
        yield ""
        yield from identification.describe_open(fitted.unidentified, command)
    yield f"{config.output}: written"


def _refuse_shared(traces: Sequence[Path], gates: Sequence[Path]) -> None:
    """Raise InputError, before the fit, for a capture to validate on that has requests of one to fit."""
    fitted_on = [fit_trace(path, trace_digest(path), load_trace(path)[1]) for path in traces if gates]
    for path in gates:
        with open_trace(path) as reader:
            refuse_fitted(fitted_on, f"--against {path}", trace_digest(path), reader)


def describe_fit(model: Model) -> str:
    """Return a fit in words: parameters with intervals, noise, errors in sample."""
    facts = model.diagnostics
    intervals = facts["intervals"]
    lines = [
        f"{facts['requests']} TTFTs and {facts['gaps']} gaps in {facts['sessions']} sessions: {intervals['prefill']} "
        f"intervals with prefill, {intervals['decode']} of decodes; {facts['variant']}",
        f"{facts['misfits']} first tokens in another step than the rules put them; condition number "
        f"{facts['condition_number']:.0f}",
    ]
    lines.append(str(Coverage(**facts["coverage"])))
    if facts["cached_agreement"] is not None:
        lines.append(f"the rules give the reported cached tokens for {facts['cached_agreement']:.1%} of requests")
    lines += ["", *_parameter_lines(model), *_noise_lines(model), "", *_error_lines(model)]
    return "\n".join(lines)


def _parameter_lines(model: Model) -> list[str]:
    rows = []
    for name, parameter in model.parameters.items():
        interval = "" if parameter.low is None else f"{parameter.low:.4g} … {parameter.high:.4g}"
        mark = "" if parameter.identified else "  (not identified)"
        rows.append([name, f"{parameter.value:.4g}", interval, f"{parameter.unit}{mark}"])
    return table_lines(["parameter", "value", "95 % interval", "unit"], rows, "<><<")


def _noise_lines(model: Model) -> list[str]:
    noise, low, high = model.noise, model.noise.levels.index(0.1), model.noise.levels.index(0.9)

    def spread(log_ratios: Sequence[float]) -> str:
        return " … ".join(f"{math.expm1(log_ratios[level]):+.0%}" for level in (low, high))

    spreads = [
        f"{step_ms:.3g} ms {spread(row)}" for step_ms, row in zip(noise.step_ms, noise.step_log_ratio, strict=True)
    ]
    least = "at least, from one capture, " if len(model.fitted_on) == 1 else ""
    return [
        f"noise, 8 steps of 10 within: {', '.join(spreads)}",
        f"autocorrelated share of a step's noise {noise.autocorrelated_share:.0%}, correlation time "
        f"{noise.correlation_time_ms / 1e3:.3g} s",
        f"API server {spread(noise.frontend_log_ratio)}; another capture may differ by {least}{model.drift_log_sd:.1%}",
    ]


def _error_lines(model: Model) -> list[str]:
    errors = model.diagnostics["errors"]
    return [f"TTFT in sample: median |e| {errors['median_abs']:.1%}, bias {errors['bias']:+.1%}"] if errors else []
