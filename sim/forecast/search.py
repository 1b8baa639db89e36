"""``sim search``: the smallest cache or fleet, or the highest rate, with which a latency percentile keeps a limit.

A forecast is monotone in expectation only. So the values around an answer are tried too, and it stands only if every
value tried on its easy side holds.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from measure import wording
from measure.cohorts import ALL, cohort_title
from measure.thresholds import Threshold
from report.grid.points import THROUGHPUT, Slice, title_of, value_text
from report.output import add_page_argument, page_path, put_page
from sim.forecast.captured import Captured, plan, read_captured
from sim.forecast.limits import measure_name, parse_limit
from sim.forecast.results import NOT_TRUSTED, ForecastPoint, Outcome, Search
from sim.forecast.scenarios import (
    AS_CAPTURED,
    AXIS_OF,
    Scenario,
    add_forecast_flags,
    add_scenario_flags,
    checked_members,
    scenarios_of,
)
from sim.latency.modelfile import load_model, model_digest
from sim.vllm.config import MOST
from tracefile import InputError
from tracefile.commandline.parser import Parser
from tracefile.commandline.progress import counted
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    import numpy as np

    from report.grid import panels
    from sim.forecast import ensemble, points
    from sim.forecast import summary as summing
else:  # numpy and a page's libraries, which the flags need not
    np = LateModule("numpy")
    panels = LateModule("report.grid.panels")
    ensemble, points, summing = late_modules("sim.forecast", "ensemble points summary")


RATE: Final = "rate"
MINIMIZED: Final = ("num-gpu-blocks", "replicas", "host-blocks")
RATES: Final = (0.1, 10.0)
"""Searched unless asked otherwise, as multiples of the captured rate."""
REPLICAS: Final = (1, 16)
"""Searched unless asked otherwise."""
NEIGHBOURS: Final = 2
"""Steps to either side of an answer that are tried."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from an easy end to a hard one, by steps of ``tolerance`` of themselves, or of one if they are counts."""

    easy: float
    hard: float
    tolerance: float
    counts: bool

    def step(self, value: float) -> float:
        step = self.tolerance * value
        return max(1.0, math.floor(step)) if self.counts else step

    def middle(self, one: float, other: float) -> float | None:
        """Between the two on a logarithmic scale; None: they are next to each other."""
        if abs(one - other) <= self.step(min(one, other)) * (1.0 + 1e-9):
            return None
        middle = self.rounded(math.sqrt(one * other))
        return None if middle in (one, other) else middle

    def neighbours(self, value: float) -> list[float]:
        """Values up to ``NEIGHBOURS`` steps from ``value``, within the ends."""
        low, high = sorted((self.easy, self.hard))
        around = [value + sign * number * self.step(value) for number in range(1, NEIGHBOURS + 1) for sign in (-1, 1)]
        return [self.rounded(min(max(one, low), high)) for one in around]

    def rounded(self, value: float) -> float:
        return float(round(value)) if self.counts else float(f"{value:.5g}")

    def in_order(self, values: list[float]) -> list[float]:
        return sorted(values, reverse=self.easy > self.hard)


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """Settings of ``sim search``."""

    trace: Path
    model: Path
    quantity: str
    target: Threshold
    scenario: Scenario
    between: tuple[float, float] | None = None
    tolerance: float = 0.01
    paced: bool | None = None
    members: int = 32
    seed: int = 0


EPILOG = """\
examples:
  sim search monday.jsonl.zst --latency-model model.json --minimize num-gpu-blocks --target 'ttft.p90<=500ms'
  sim search monday.jsonl.zst --latency-model model.json --maximize rate --target 'ttft.p99<=2s'
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim fit")
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
    parser.add_setting("--tolerance", type=float, default=0.01, help="share to which the result is found; 0: the block")
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    add_scenario_flags(parser)
    add_forecast_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Search and print; 1 if no value holds."""
    quantity: str = arguments.minimize or arguments.maximize
    html = page_path(arguments, [arguments.trace, arguments.latency_model])
    config = SearchConfig(
        trace=arguments.trace,
        model=arguments.latency_model,
        quantity=quantity,
        target=parse_limit("--target", arguments.target),
        scenario=_only_one(scenarios_of(arguments, searched=quantity), quantity),
        between=None if arguments.between is None else _between(arguments.between, quantity),
        tolerance=_checked_tolerance(arguments.tolerance, quantity),
        paced=arguments.replay_sessions,
        members=checked_members(arguments.members),
        seed=arguments.seed,
    )
    found = search(config)
    put_page(panels.grid_page(found, "sim search", "docs/what-if.md"), found, as_json=arguments.json, html=html)
    return {"found": 0, "all hold": 0, "none holds": 1, "interrupted": 130}[found.outcome]


def search(config: SearchConfig) -> Search:
    model = load_model(config.model)
    captured = read_captured(config.trace, model, paced=config.paced)
    points.check_cohorts("--target", [config.target], captured)
    low, high = config.between or _widest(captured, config)
    smallest = config.quantity != RATE
    scale = Scale(*((high, low) if smallest else (low, high)), tolerance=config.tolerance, counts=smallest)
    for end in (low, high):
        plan(captured, _at(config, end))  # refuses settings before any forecast
    trust = summing.trust_on(captured, model, ensemble.members(model, config.members, config.seed), config.seed)
    forecast, done = points.PointForecast(captured, model, config.seed), counted(range(sys.maxsize), "forecasts")
    tried: dict[float, ForecastPoint] = {}

    def holds(value: float) -> bool:
        found = forecast((_at(config, value), config.members), threads=None, done=lambda: next(done))
        name = value_words(config.quantity, value)
        tried[value] = points.make_point(name, {config.quantity: value}, found, [config.target])
        return bool(tried[value].meets)

    outcome: Outcome = "interrupted"
    answer: float | None = None
    try:
        answer = bisect(scale, holds)
        outcome = "none holds" if answer is None else "all hold" if answer == scale.hard else "found"
    except KeyboardInterrupt:
        print(f"sim search: interrupted; {len(tried)} values are done", file=sys.stderr)
    evaluated = [_marked(tried[value], value == answer) for value in sorted(tried)]
    trusted = trust is None or trust.trusted
    return Search(
        source=f"{config.trace.name}, {config.scenario.name}",
        headlines=[_sentence(config, captured, evaluated, answer, outcome=outcome, ends=(low, high), trusted=trusted)],
        verdicts=[points.verdict_on(captured, model, config.model, trust)],
        notes=[*points.shared_notes(captured, model), *_not_monotone(evaluated, scale, config.quantity)],
        axes=[config.quantity],
        latency=measure_name(config.target),
        throughput=THROUGHPUT,
        columns=list(dict.fromkeys([measure_name(config.target), "within", "hit_rate", THROUGHPUT, "utilization"])),
        points=evaluated,
        slices=[Slice(axis=config.quantity, lines={"": evaluated}, limit=config.target.limit)],
        trace_digest=captured.digest,
        model_digest=model_digest(model),
        trusted=trusted,
        paced=captured.paced,
        requests=len(captured.records),
        seed=config.seed,
        members=config.members,
        limits=[config.target.text],
        count=len(evaluated),
        quantity=config.quantity,
        low=low,
        high=high,
        tolerance=config.tolerance,
        scenario=config.scenario.name,
        outcome=outcome,
        answer=answer,
    )


def _marked(point: ForecastPoint, is_answer: bool) -> ForecastPoint:
    marks = [*(["saturated"] if point.saturated else []), *(["chosen"] if is_answer else [])]
    return msgspec.structs.replace(point, marks=marks)


def value_words(quantity: str, value: float) -> str:
    return f"×{value:g}" if quantity == RATE else f"{value:,.0f}"


def _sentence(
    config: SearchConfig,
    captured: Captured,
    evaluated: Sequence[ForecastPoint],
    answer: float | None,
    *,
    outcome: Outcome,
    ends: tuple[float, float],
    trusted: bool,
) -> str:
    cohort = config.target.cohort or ALL
    n = len(summing.cohorts_of(captured.records)[cohort])
    target = f"{config.target.text} ({cohort_title(cohort).lower()}, n = {n:,})"
    sure, quantity = f"with {points.CONFIDENCE:.0%} confidence", config.quantity
    if outcome == "interrupted":
        return f"Interrupted: no answer yet for {target} {sure}"
    if answer is None:
        low, high = (value_words(quantity, end) for end in ends)
        unreached = f"Not reachable: {target} {sure} holds at no {quantity} between {low} and {high}"
        if all(point.saturated for point in evaluated):
            return f"{unreached}: {_overload(evaluated)}"
        best = max(
            evaluated,
            key=lambda point: (point.middle("within") or 0.0, -(point.middle(measure_name(config.target)) or 0.0)),
        )
        name = measure_name(config.target)
        value = f"{title_of(name)} {value_text(best, name)}"
        return f"{unreached}; the best is {best.name}: {best.middle('within'):.0%} of the members within, {value}"
    sentence = f"{'Highest' if quantity == RATE else 'Smallest'} {quantity} for {target} {sure}: "
    sentence += value_words(quantity, answer) + ("" if trusted else NOT_TRUSTED)
    if outcome == "all hold":
        sentence += ", the end of what was asked: it may hold beyond (--between)"
    limit = _stopped_by_load(evaluated, answer, quantity)
    return (
        sentence
        if limit is None
        else f"{sentence}, where the load reaches what the engine can do: {_overload([limit])}"
    )


def _stopped_by_load(evaluated: Sequence[ForecastPoint], answer: float, quantity: str) -> ForecastPoint | None:
    """Return the next harder value if it fails by its load alone."""
    values = {float(point.settings[quantity] or 0.0): point for point in evaluated}
    harder = [value for value in values if value != answer and (value < answer) == (quantity != RATE)]
    beside = values[min(harder, key=lambda value: abs(value - answer))] if harder else None
    return (
        beside
        if beside is not None and beside.saturated and (beside.middle("within") or 0.0) >= points.CONFIDENCE
        else None
    )


def _overload(saturated: Sequence[ForecastPoint]) -> str:
    least = min(point.middle("utilization") or 0.0 for point in saturated)
    return f"at {least:.0%} and more waits grow for as long as the load lasts"


def _at(config: SearchConfig, value: float) -> Scenario:
    """Return the scenario with a value of what is searched. Raises InputError for one that its flag refuses."""
    axis = AXIS_OF[config.quantity]
    return axis.put(config.scenario, axis.read(axis.flag, str(value if config.quantity == RATE else round(value))))


def _widest(captured: Captured, config: SearchConfig) -> tuple[float, float]:
    if config.quantity == RATE:
        return RATES
    if config.quantity == "replicas":
        return REPLICAS
    load = plan(captured, _at(config, MOST))
    size = load.engine.block_size
    arrivals = load.arrivals
    held = -(-(arrivals.prompt_tokens + arrivals.output_tokens - 1) // size)[arrivals.runs]
    least = int(held.max(initial=1)) + 1
    return float(least), float(max(load.most_blocks + 1, least))


def _not_monotone(evaluated: Sequence[ForecastPoint], scale: Scale, quantity: str) -> Iterator[str]:
    in_order = {float(point.settings[quantity] or 0.0): bool(point.meets) for point in evaluated}
    values = scale.in_order(list(in_order))
    failed = next((index for index, value in enumerate(values) if not in_order[value]), len(values))
    beyond = [value for value in values[failed:] if in_order[value]]
    if beyond:
        again = wording.listed([f"{value:g}" for value in beyond])
        yield f"not monotone: the target holds again at {again}, though not at {values[failed]:g}, which is easier"


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


def _checked_tolerance(tolerance: float, quantity: str) -> float:
    least = 1e-4 if quantity == RATE else 0.0
    if not least <= tolerance < 1.0:
        raise InputError(f"--tolerance: {tolerance:g}; expected a share from {least:g} to below 1")
    return tolerance


def bisect(scale: Scale, holds: Callable[[float], bool]) -> float | None:
    """Return the hardest value that holds with every easier one that was tried; None: the easy end does not hold."""
    tried = {scale.easy: holds(scale.easy)}
    if not tried[scale.easy]:
        return None
    tried.setdefault(scale.hard, scale.hard in tried or holds(scale.hard))
    while True:
        good, bad = edge(scale, tried)
        value = None if bad is None else scale.middle(good, bad)
        if value is None:
            value = next((one for one in scale.neighbours(good) if one not in tried), None)
        if value is None:
            return good
        tried[value] = holds(value)


def edge(scale: Scale, tried: dict[float, bool]) -> tuple[float, float | None]:
    """Return the last value before which all values tried from the easy end hold, and the next one, which does not."""
    good = scale.easy
    for value in scale.in_order(list(tried)):
        if not tried[value]:
            return good, value
        good = value
    return good, None
