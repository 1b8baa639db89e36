"""Description of a fit for a terminal: its data, parameters, noise and errors."""

from measure.table import table_lines
from measure.wording import NOTHING
from sim.fit.identification import Coverage
from sim.fit.residuals import Requests, locate_misfit
from sim.latency.modelfile import Model, Parameter


def describe_fit(model: Model) -> str:
    facts = model.diagnostics
    intervals = facts["intervals"]
    lines = [
        f"{facts['requests']} TTFTs and {facts['gaps']} gaps in {facts['sessions']} sessions: {intervals['prefill']} "
        f"intervals with prefill, {intervals['decode']} of decodes; {facts['variant']}",
        f"{facts['misfits']} first tokens in another step than the rules put them; condition number "
        f"{facts['condition_number']:.0f}",
    ]
    lines.append(str(Coverage(**facts["coverage"])))
    if len(facts["variants"]) > 1:
        lines += [f"  loss {loss:.4f}  {name}" for name, loss in facts["variants"].items()]
    lines += [f"  held-out loss {loss:.4f}  {terms}" for terms, loss in facts["terms"].items()]
    if "borrowed" in facts:
        lines.append(facts["borrowed"]["said"])
    if facts["cached_agreement"] is not None:
        lines.append(f"the rules give the reported cached tokens for {facts['cached_agreement']:.1%} of requests")
    lines += ["", *_parameter_lines(model), *_noise_lines(model), "", *_error_lines(model)]
    return "\n".join(lines)


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
    spreads = [
        f"{step_ms:.3g} ms {row[low]:+.0%} … {row[high]:+.0%}"
        for step_ms, row in zip(noise.step_ms, noise.step_log_ratio, strict=True)
    ]
    front = noise.frontend_log_ratio
    least = "at least, from one capture, " if len(model.fitted_on) == 1 else ""
    return [
        f"noise, 8 steps of 10 within: {', '.join(spreads)}",
        f"autocorrelated share of a step's noise {noise.autocorrelated_share:.0%}, correlation time "
        f"{noise.correlation_time_ms / 1e3:.3g} s",
        f"API server {front[low]:+.0%} … {front[high]:+.0%}; another capture may differ by {least}"
        f"{model.drift_log_sd:.1%}",
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


def describe_misfit(requests: Requests) -> str:
    """Return TTFT errors before calibration along prompt length, depth and concurrency, in bins of equal count."""
    rows = [
        [
            *(cell.axis, f"{cell.low:.0f}", f"{cell.high:.0f}", str(cell.requests)),
            *(f"{cell.bias:+.1%}", f"{cell.bias_ms:+.1f}", f"{cell.median_abs:.1%}"),
        ]
        for cell in locate_misfit(requests)
    ]
    headings = ["along", "from", "to", "n", "bias", "bias ms", "median |e|"]
    return "\n".join(["", *table_lines(headings, rows, "<")])
