"""``sim search``: smallest KV cache or fleet, or highest rate, that keeps a latency limit.

A bisection from the easy end (largest cache, lowest rate): all values tried on the easy side of the answer hold.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from measure.cohorts import ALL, cohort_title
from measure.thresholds import Threshold
from report.grid import panels
from report.grid.points import THROUGHPUT, title_of, value_text
from report.output import page_path, put_page
from sim.forecast import points
from sim.forecast.captured import Captured, plan
from sim.forecast.limits import measure_name, parse_limit
from sim.forecast.points import ForecastConfig
from sim.forecast.results import NOT_TRUSTED, ForecastGrid, ForecastPoint, Outcome
from sim.forecast.scenarios import (
    AS_CAPTURED,
    AXIS_OF,
    Scenario,
    scenarios_of,
)
from sim.vllm.config import MOST
from tracefile.commandline.progress import counted
from tracefile.records.errors import InputError

RATE: Final = "rate"
RATES: Final = (0.1, 10.0)
"""Default range, as factors of the captured rate."""
REPLICAS: Final = (1, 16)
"""Default range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Searched quantity and its latency limit."""

    quantity: str
    target: Threshold
    scenario: Scenario = AS_CAPTURED
    between: tuple[float, float] | None = None
    tolerance: float = 0.01
    """Distance at which the bisection stops, as a share."""


def run(arguments: argparse.Namespace) -> int:
    quantity: str = arguments.minimize or arguments.maximize
    html = page_path(arguments, [arguments.trace, arguments.latency_model])
    question = Question(
        quantity=quantity,
        target=parse_limit("--target", arguments.target),
        scenario=_base_scenario(scenarios_of(arguments, searched=quantity), quantity),
        between=None if arguments.between is None else _between(arguments.between, quantity),
    )
    result = search(points.config_of(arguments), question)
    put_page(panels.grid_page(result, "sim search", "docs/what-if.md"), result, as_json=arguments.json, html=html)
    return int(result.outcome == "none holds")


def search(config: ForecastConfig, question: Question) -> ForecastGrid:
    forecast = points.PointForecast(config, "--target", [question.target])
    done = counted(range(sys.maxsize), "forecasts")
    ends = low, high = question.between or _widest(forecast.captured, question)
    for end in ends:
        plan(forecast.captured, _at(question, end))  # refuses settings before any forecast
    about = forecast.about() | {"source": f"{config.trace.name}, {question.scenario.name}"}
    tried: dict[float, ForecastPoint] = {}

    def holds(value: float) -> bool:
        values = forecast((_at(question, value), config.members), procs=None, done=lambda: next(done))
        words = value_words(question.quantity, value)
        tried[value] = points.make_point(words, {question.quantity: value}, values, [question.target])
        return bool(tried[value].meets)

    counts, name = question.quantity != RATE, measure_name(question.target)
    easy, hard = (high, low) if counts else (low, high)
    answer = bisect(easy, hard, holds, question.tolerance, counts=counts)
    outcome: Outcome = "none holds" if answer is None else "all hold" if answer == hard else "found"
    shown = [points.with_mark(tried[value], "chosen") if value == answer else tried[value] for value in sorted(tried)]
    result = ForecastGrid(
        axes=[question.quantity],
        latency=name,
        throughput=THROUGHPUT,
        columns=list(dict.fromkeys([name, "within", "hit_rate", THROUGHPUT, "utilization"])),
        limit=question.target.limit,
        points=shown,
        limits=[question.target.text],
        outcome=outcome,
        **about,
    )
    return msgspec.structs.replace(result, headlines=[_sentence(result, question, ends)])


def value_words(quantity: str, value: float) -> str:
    return f"×{value:g}" if quantity == RATE else f"{value:,.0f}"


def _sentence(result: ForecastGrid, question: Question, ends: tuple[float, float]) -> str:
    cohort, quantity, name = question.target.cohort or ALL, question.quantity, result.latency
    target = f"{question.target.text} ({cohort_title(cohort).lower()}, n = {result.cohorts[cohort]:,})"
    target += f" with {points.CONFIDENCE:.0%} confidence"
    answer = result.marked("chosen")
    if answer is None:
        (best,) = result.points
        low, high = (value_words(quantity, end) for end in ends)
        state = "is saturated" if best.saturated else f"has {title_of(name)} {value_text(best, name)}"
        return f"Not reachable: {target} holds at no {quantity} between {low} and {high}; {best.name} {state}"
    sentence = f"{'Highest' if quantity == RATE else 'Smallest'} {quantity} for {target}: {answer.name}"
    sentence += "" if result.trusted else NOT_TRUSTED
    beyond = ", the end of the range; extend it with --between"
    return sentence + (beyond if result.outcome == "all hold" else "")


def _at(question: Question, value: float) -> Scenario:
    axis = AXIS_OF[question.quantity]
    return axis.put(question.scenario, axis.read(axis.flag, str(value if question.quantity == RATE else round(value))))


def _widest(captured: Captured, question: Question) -> tuple[float, float]:
    if question.quantity == RATE:
        return RATES
    if question.quantity == "replicas":
        return REPLICAS
    load = plan(captured, _at(question, MOST))
    size = load.engine.block_size
    arrivals = load.arrivals
    request_blocks = -(-(arrivals.prompt_tokens + arrivals.output_tokens - 1) // size)[arrivals.runs]
    least = int(request_blocks.max(initial=1)) + 1
    return float(least), float(max(load.most_blocks + 1, least))


def _base_scenario(scenarios: Sequence[Scenario], quantity: str) -> Scenario:
    if len(scenarios) > 1:
        raise InputError(f"{len(scenarios)} scenarios; expected one value of each flag, as {quantity} is varied")
    scenario = scenarios[0] if scenarios else Scenario({})
    axis = AXIS_OF[quantity]
    if axis.value_in(scenario) != axis.value_in(AS_CAPTURED):
        raise InputError(f"--{quantity}: it is what is searched; expected --between to limit it")
    return scenario


def _between(text: str, quantity: str) -> tuple[float, float]:
    words = text.split(",")
    low, high = (float(AXIS_OF[quantity].read("--between", word)) for word in words) if len(words) == 2 else (0.0, 0.0)
    if not 0.0 < low < high:
        raise InputError(f"--between: {text!r}; expected two values above 0, the smaller first")
    return low, high


def bisect(easy: float, hard: float, holds: Callable[[float], bool], tolerance: float, *, counts: bool) -> float | None:
    """Return the value nearest to ``hard`` that holds, within a relative ``tolerance``; None: ``easy`` fails."""
    if not holds(easy):
        return None
    if holds(hard):
        return hard
    while abs(hard - easy) > max(tolerance * min(hard, easy), 1.0 if counts else 1e-9):
        middle = math.sqrt(easy * hard)
        middle = float(round(middle)) if counts else float(f"{middle:.5g}")
        if middle in (easy, hard):
            break
        if holds(middle):
            easy = middle
        else:
            hard = middle
    return easy
