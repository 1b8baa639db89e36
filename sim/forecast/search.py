"""``sim search``: the smallest cache or fleet, or the highest rate, with which a latency percentile keeps a limit.

A forecast is monotone in expectation only. So the values around an answer are tried too, and it stands only if every
value tried on its easy side holds.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from measure.cohorts import ALL, cohort_title
from measure.thresholds import Threshold
from report.grid.points import THROUGHPUT, title_of, value_text
from report.output import add_page_argument, page_path, put_page
from sim.forecast.captured import Captured, plan
from sim.forecast.limits import measure_name, parse_limit
from sim.forecast.results import NOT_TRUSTED, ForecastGrid, ForecastPoint, Outcome
from sim.forecast.scenarios import (
    AS_CAPTURED,
    AXIS_OF,
    Scenario,
    add_forecast_flags,
    add_scenario_flags,
    scenarios_of,
)
from sim.vllm.config import MOST
from tracefile import InputError
from tracefile.commandline.parser import Parser
from tracefile.commandline.progress import counted
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    import numpy as np

    from report.grid import panels
    from sim.forecast import points
    from sim.forecast.points import ForecastConfig
else:  # numpy and a page's libraries, which the flags need not
    np = LateModule("numpy")
    panels = LateModule("report.grid.panels")
    points = LateModule("sim.forecast.points")


RATE: Final = "rate"
MINIMIZED: Final = ("num-gpu-blocks", "replicas", "host-blocks")
RATES: Final = (0.1, 10.0)
"""Searched unless asked otherwise, as multiples of the captured rate."""
REPLICAS: Final = (1, 16)
"""Searched unless asked otherwise."""
NEIGHBOURS: Final = 2
"""Steps to either side of an answer that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Quantity to search, and its limits."""

    quantity: str
    target: Threshold
    scenario: Scenario = AS_CAPTURED
    between: tuple[float, float] | None = None
    tolerance: float = 0.01


EPILOG = """\
examples:
  sim search monday.jsonl.zst --latency-model model.json --minimize num-gpu-blocks --target 'ttft.p90<=500ms'
  sim search monday.jsonl.zst --latency-model model.json --maximize rate --target 'ttft.p99<=2s'
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim calibrate")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--minimize", choices=MINIMIZED, help="what to find the least of (required, or --maximize)")
    wanted.add_argument("--maximize", choices=[RATE], help="what to find the most of (required, or --minimize)")
    parser.add_argument(
        "--target",
        required=True,
        metavar="THRESHOLD",
        help="[COHORT.]METRIC.pNN<=LIMIT of ttft, itl, e2e or queue, as turns2+.ttft.p90<=500ms, or hit_rate>=30%%",
    )
    parser.add_argument(
        "--between",
        metavar="LOW,HIGH",
        help="where to look, such as 2,8 (default: every cache, rates 0.1 to 10, 1 to 16 replicas)",
    )
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    add_scenario_flags(parser)
    add_forecast_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Search and print; 1 if no value holds."""
    quantity: str = arguments.minimize or arguments.maximize
    html = page_path(arguments, [arguments.trace, arguments.latency_model])
    question = Question(
        quantity=quantity,
        target=parse_limit("--target", arguments.target),
        scenario=_only_one(scenarios_of(arguments, searched=quantity), quantity),
        between=None if arguments.between is None else _between(arguments.between, quantity),
    )
    found = search(points.config_of(arguments), question)
    put_page(panels.grid_page(found, "sim search", "docs/what-if.md"), found, as_json=arguments.json, html=html)
    return {"none holds": 1, "interrupted": 130}.get(found.outcome or "", 0)


def search(config: "ForecastConfig", question: Question) -> ForecastGrid:
    forecast = points.PointForecast(config, "--target", [question.target])
    captured, done = forecast.captured, counted(range(sys.maxsize), "forecasts")
    low, high = question.between or _widest(captured, question)
    smallest, name = question.quantity != RATE, measure_name(question.target)
    scale = values_between(low, high, question.tolerance, counts=smallest)[:: -1 if smallest else 1]
    for end in (low, high):
        plan(captured, _at(question, end))  # refuses settings before any forecast
    about = forecast.about() | {"source": f"{config.trace.name}, {question.scenario.name}"}
    tried: dict[float, ForecastPoint] = {}

    def holds(value: float) -> bool:
        found = forecast((_at(question, value), config.members), threads=None, done=lambda: next(done))
        words = value_words(question.quantity, value)
        tried[value] = points.make_point(words, {question.quantity: value}, found, [question.target])
        return bool(tried[value].meets)

    outcome: Outcome = "interrupted"
    answer: float | None = None
    try:
        answer = bisect(scale, holds)
        outcome = "none holds" if answer is None else "all hold" if answer == scale[-1] else "found"
    except KeyboardInterrupt:
        print(f"sim search: interrupted; {len(tried)} values are done", file=sys.stderr)
    some = [points.with_mark(tried[value], "chosen") if value == answer else tried[value] for value in sorted(tried)]
    found = ForecastGrid(
        axes=[question.quantity],
        latency=name,
        throughput=THROUGHPUT,
        columns=list(dict.fromkeys([name, "within", "hit_rate", THROUGHPUT, "utilization"])),
        limit=question.target.limit,
        points=some,
        limits=[question.target.text],
        outcome=outcome,
        **about,
    )
    return msgspec.structs.replace(found, headlines=[_sentence(found, question, (low, high))])


def value_words(quantity: str, value: float) -> str:
    return f"×{value:g}" if quantity == RATE else f"{value:,.0f}"


def _sentence(found: ForecastGrid, question: Question, ends: tuple[float, float]) -> str:
    cohort, quantity, name = question.target.cohort or ALL, question.quantity, found.latency
    target = f"{question.target.text} ({cohort_title(cohort).lower()}, n = {found.cohorts[cohort]:,})"
    target += f" with {points.CONFIDENCE:.0%} confidence"
    answer = found.marked("chosen")
    if found.outcome == "interrupted":
        return f"Interrupted: no answer yet for {target}"
    if answer is None:
        low, high = (value_words(quantity, end) for end in ends)
        unreached = f"Not reachable: {target} holds at no {quantity} between {low} and {high}"
        if all(point.saturated for point in found.points):
            least = min(point.middle("utilization") or 0.0 for point in found.points)
            return f"{unreached}: at {least:.0%} and more waits grow for as long as the load lasts"
        best = max(found.points, key=lambda one: (one.middle("within") or 0.0, -(one.middle(name) or 0.0)))
        value = f"{title_of(name)} {value_text(best, name)}"
        return f"{unreached}; the best is {best.name}: {best.middle('within'):.0%} of the members within, {value}"
    sentence = f"{'Highest' if quantity == RATE else 'Smallest'} {quantity} for {target}: {answer.name}"
    sentence += "" if found.trusted else NOT_TRUSTED
    beyond = ", the end of what was asked: it may hold beyond (--between)"
    return sentence + (beyond if found.outcome == "all hold" else "")


def _at(question: Question, value: float) -> Scenario:
    """Return the scenario with a value of what is searched. Raises InputError for one that its flag refuses."""
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
    held = -(-(arrivals.prompt_tokens + arrivals.output_tokens - 1) // size)[arrivals.runs]
    least = int(held.max(initial=1)) + 1
    return float(least), float(max(load.most_blocks + 1, least))


def _only_one(scenarios: Sequence[Scenario], quantity: str) -> Scenario:
    if len(scenarios) > 1:
        raise InputError(f"{len(scenarios)} scenarios; expected one value of each flag, as {quantity} is varied")
    one = scenarios[0] if scenarios else Scenario({})
    axis = AXIS_OF[quantity]
    if axis.value_in(one) != axis.value_in(AS_CAPTURED):
        raise InputError(f"--{quantity}: it is what is searched; expected --between to limit it")
    return one


def _between(text: str, quantity: str) -> tuple[float, float]:
    try:
        low, high = (float(word) for word in text.split(","))
    except ValueError:
        low = high = 0.0
    whole = low == round(low) and high == round(high)
    least = {"num-gpu-blocks": 2, RATE: 0}.get(quantity, 1)
    if not 0.0 < low < high < float("inf") or (quantity != RATE and (low < least or not whole)):
        kind = "two numbers above 0" if quantity == RATE else f"two whole numbers from {least} on"
        raise InputError(f"--between: {text!r}; expected {kind}, the smaller first")
    return low, high


def values_between(low: float, high: float, tolerance: float, *, counts: bool) -> list[float]:
    """Return values from ``low`` to ``high``, by steps of ``tolerance`` of themselves, or of one if they are counts."""
    found, value = [low], low
    while True:
        step = tolerance * value
        value = value + max(1.0, math.floor(step)) if counts else float(f"{value + step:.5g}")
        if value >= high:
            return [*found, high]
        found.append(value)


def bisect(values: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """Return the last value that holds with every one before it that was tried; None: the first does not hold."""
    tried = {0: holds(values[0])}
    if not tried[0]:
        return None
    tried[len(values) - 1] = holds(values[-1])
    while True:
        good, bad = edge(tried)
        around = [good + sign * number for number in range(1, NEIGHBOURS + 1) for sign in (-1, 1)]
        wanted = [(good + bad) // 2] if bad is not None and bad > good + 1 else around
        place = next((one for one in wanted if 0 <= one < len(values) and one not in tried), None)
        if place is None:
            return values[good]
        tried[place] = holds(values[place])


def edge(tried: Mapping[int, bool]) -> tuple[int, int | None]:
    """Return the last place before which all that were tried hold, and the next one, which does not."""
    good = 0
    for place in sorted(tried):
        if not tried[place]:
            return good, place
        good = place
    return good, None
