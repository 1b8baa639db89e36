"""``sim fit``: fit an engine's step times to captured traces."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, get_args

from measure.metrics.flags import checked_bootstrap
from measure.table import table_lines
from measure.wording import NOTHING
from sim.fit import CachedSource
from sim.latency.modelfile import Model, Parameter, load_model, save_model
from sim.latency.terms import EXTRA_TERMS, FrontendPlacement
from sim.vllm.config import add_engine_flags, engine_overrides, given_engine_flags
from tracefile import InputError
from tracefile.commandline.configfile import refuse_beside
from tracefile.commandline.parser import same_named, seed
from tracefile.records.latenames import late_modules
from tracefile.storage.output import MODEL, check_output

if TYPE_CHECKING:
    from sim.fit import fitting, identification, pace, residuals
else:  # numpy and the kernels, which the flags need not
    fitting, identification, pace, residuals = late_modules("sim.fit", "fitting identification pace residuals")

KEPT_SHAPE = "the model keeps its terms and its engine"

EPILOG = """\
examples:
  sim fit calibration.jsonl.zst -o model.json
  sim fit monday.jsonl.zst --borrow-from model.json -o model-monday.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE", help="captures of one engine")
    parser.add_argument("-o", "--output", type=Path, required=True, help="model.json to write")
    pace = parser.add_argument_group("the pace of today, in place of a fit").add_argument
    pace("--pace-from", type=Path, metavar="CAPTURE", help="scale --latency-model by the step times of any traffic")
    pace("--latency-model", type=Path, metavar="MODEL", help="model.json whose shape stays")
    parser.add_argument("--bootstrap", type=int, default=400, help="resamples of the sessions; 0: none")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the bootstrap")
    add_fit_flags(parser)
    add_engine_flags(parser)


def add_fit_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cached",
        choices=get_args(CachedSource),
        default="factual",
        help="cached tokens as the traces report them, or as a simulated pool has them",
    )
    parser.add_argument(
        "--api-server",
        dest="frontend",
        choices=[*get_args(FrontendPlacement), "auto"],
        default="auto",
        help="API server: works on all requests at once (parallel), on one at a time (serial), or so on the engine's "
        "core (shared_core); auto: the simplest that predicts best",
    )
    parser.add_argument(
        "--term",
        action="append",
        choices=[*EXTRA_TERMS, "none"],
        default=[],
        help="cost to fit beyond the default ones, as under sim serve; repeatable (none: no more; default: those "
        "that improve forecasts of sessions left out)",
    )
    parser.add_argument(
        "--borrow-from",
        type=Path,
        metavar="MODEL",
        help="model.json of the same engine that lends, at the captures' pace, what the captures do not identify; its "
        "terms and API server are the fit's",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the model if it exists")
    parser.add_argument("--residuals", action="store_true", help="print TTFT errors by cohort and of two baselines")


def run(arguments: argparse.Namespace) -> int:
    """Fit; with ``--pace-from``, scale a model instead."""
    paced = (arguments.pace_from, arguments.latency_model)
    if paced == (None, None):
        if not arguments.traces:
            raise InputError("TRACE: none; expected captures of one engine")
        fit_and_save(read_config(arguments))
        return 0
    if None in paced or arguments.traces:
        raise InputError("--pace-from: expected --pace-from CAPTURE --latency-model MODEL -o OUT, and no TRACE")
    refuse_beside("--pace-from", arguments, ("borrow_from", "residuals"), KEPT_SHAPE)
    if arguments.term or given_engine_flags(arguments):
        flag = "--term" if arguments.term else given_engine_flags(arguments)[0]
        raise InputError(f"{flag}: given with --pace-from; expected one of them: {KEPT_SHAPE}")
    check_output(arguments.output, MODEL, paced, "--output", overwrite=arguments.overwrite)
    model = pace.paced_model(load_model(arguments.latency_model), arguments.pace_from)
    save_model(model, arguments.output)
    print(model.diagnostics["pace"]["said"], f"{arguments.output}: written", sep="\n")
    return 0


def read_config(arguments: argparse.Namespace) -> "fitting.FitConfig":
    """Read the command line. Raises InputError that names the flag."""
    checked_bootstrap(arguments.bootstrap)
    terms = arguments.term
    if arguments.borrow_from is not None and (terms or arguments.frontend != "auto"):
        raise InputError("--term, --api-server: given with --borrow-from, whose model decides both; expected neither")
    made = {
        "traces": tuple(arguments.traces),
        "overrides": engine_overrides(arguments),
        "frontend": None if arguments.frontend == "auto" else arguments.frontend,
        "extra_terms": tuple(name for name in dict.fromkeys(terms) if name != "none") if terms else None,
    }
    return fitting.FitConfig(**(same_named(fitting.FitConfig, arguments) | made))


def fit_and_save(config: "fitting.FitConfig", to: TextIO | None = None) -> Model:
    """Fit, write model.json, print the fit to ``to`` (None: stdout)."""
    lenders = () if config.borrow_from is None else (config.borrow_from,)
    check_output(config.output, MODEL, (*config.traces, *lenders), "--output", overwrite=config.overwrite)
    fitted = fitting.fit_traces(config)
    save_model(fitted.model, config.output)
    print(describe_fit(fitted.model), file=to)
    if fitted.unidentified:
        command = fitted.model.diagnostics["next_capture"]
        print(
            "",
            *identification.describe_open(fitted.unidentified, command, config.traces, config.output),
            sep="\n",
            file=to,
        )
    if config.residuals:
        print(describe_misfit(fitted.requests), file=to)
    print(f"{config.output}: written", file=to)
    return fitted.model


def describe_fit(model: Model) -> str:
    facts = model.diagnostics
    intervals = facts["intervals"]
    lines = [
        f"{facts['requests']} TTFTs and {facts['gaps']} gaps in {facts['sessions']} sessions: {intervals['prefill']} "
        f"intervals with prefill, {intervals['decode']} of decodes; {facts['variant']}",
        f"{facts['misfits']} first tokens in another step than the rules put them; condition number "
        f"{facts['condition_number']:.0f}",
    ]
    lines.append(str(identification.Coverage(**facts["coverage"])))
    taken = {"default", *(name for name in EXTRA_TERMS if name in model.parameters)}
    lines += _tried("ways of scheduling", "loss", facts["variants"], facts["variant"])
    lines += _tried(
        "sets of terms",
        "held-out loss",
        facts["terms"],
        next((name for name in facts["terms"] if {*name.split(" + ")} == taken), None),
    )
    if "borrowed" in facts:
        lines.append(facts["borrowed"]["said"])
    if facts["cached_agreement"] is not None:
        lines.append(f"the rules give the reported cached tokens for {facts['cached_agreement']:.1%} of requests")
    lines += ["", *_parameter_lines(model), *_noise_lines(model), "", *_error_lines(model)]
    return "\n".join(lines)


def _tried(noun: str, measure: str, losses: Mapping[str, float], taken: str | None) -> list[str]:
    """Return a line on the choice; model.json's diagnostics have every loss."""
    if len(losses) < 2 or taken is None:
        return []
    least, most = min(losses.values()), max(losses.values())
    return [
        f"{len(losses)} {noun} tried, {measure} {least:.4f} to {most:.4f}; taken, with {losses[taken]:.4f}: {taken}"
    ]


def _parameter_lines(model: Model) -> list[str]:
    rows = []
    for name, parameter in model.parameters.items():
        interval = "" if parameter.low is None else f"{parameter.low:.4g} … {parameter.high:.4g}"
        rows.append([name, f"{parameter.value:.4g}", interval, f"{parameter.unit}{_mark(parameter)}"])
    return table_lines(["parameter", "value", "95 % interval", "unit"], rows, "<><<")


def _mark(parameter: Parameter) -> str:
    if parameter.borrowed:
        return "  (borrowed)"
    return "" if parameter.identified else "  (not identified)"


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
    rows = [
        [
            errors["cohort"],
            str(errors["requests"]),
            *(NOTHING if errors[level] is None else f"{errors[level]:+.1%}" for level in ("p50", "p90", "p99")),
            f"{errors['median_abs']:.1%}",
            f"{errors['bias']:+.1%}",
        ]
        for errors in model.diagnostics["errors"]
    ]
    lines = table_lines(["TTFT error in sample", "n", "p50", "p90", "p99", "median |e|", "bias"], rows, "<")
    lines += [
        f"baseline {name.replace('_', ' ')} ({baseline.formula}): median |e| {baseline.median_abs_error:.1%}, "
        f"p90 |e| {baseline.p90_abs_error:.1%}"
        for name, baseline in model.baselines.items()
    ]
    return lines


def describe_misfit(requests: "residuals.Requests") -> str:
    """Return TTFT errors before calibration along prompt length, depth and concurrency, in bins of equal count."""
    rows = [
        [
            *(cell.axis, f"{cell.low:.0f}", f"{cell.high:.0f}", str(cell.requests)),
            *(f"{cell.bias:+.1%}", f"{cell.bias_ms:+.1f}", f"{cell.median_abs:.1%}"),
        ]
        for cell in residuals.locate_misfit(requests)
    ]
    headings = ["along", "from", "to", "n", "bias", "bias ms", "median |e|"]
    return "\n".join(["", *table_lines(headings, rows, "<")])
