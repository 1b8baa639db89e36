"""A fit in words: parameters with intervals, noise, errors in sample."""

import math
from collections.abc import Sequence

from measure.table import table_lines
from sim.fit.identification import Coverage
from sim.latency.modelfile import Model


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
