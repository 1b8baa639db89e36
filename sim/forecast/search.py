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
from typing import TYPE_CHECKING, cast, get_args

from measure.cohorts import ALL, MAIN
from measure.thresholds import parse_threshold
from report.compare.results import Metric
from report.output import add_page_argument, page_path, write_page
from report.pages.search import Evaluated, Outcome, Quantity, Search, describe
from sim.forecast.captured import Captured, Load, plan, read_captured
from sim.forecast.scenarios import (
    AS_CAPTURED,
    AXIS_OF,
    Scenario,
    add_forecast_flags,
    add_scenario_flags,
    checked_confidence,
    checked_members,
    scenarios_of,
)
from sim.latency.modelfile import Model, load_model, model_digest
from sim.latency.verdicts import engine_warning, verdict_sentence
from sim.vllm.config import MOST
from tracefile import InputError
from tracefile.commandline.printing import print_result
from tracefile.commandline.progress import counted
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    import numpy as np

    from report.pages import forecastpages
    from sim.forecast import ensemble
    from sim.forecast import fleets as running
    from sim.forecast import summary as summing
    from sim.forecast.ensemble import Forecast
    from tracefile.records.arrays import FloatArray
else:  # numpy and a page's libraries, which the flags need not
    np = LateModule("numpy")
    forecastpages = LateModule("report.pages.forecastpages")
    ensemble, running, summing = late_modules("sim.forecast", "ensemble fleets summary")


MINIMIZED = tuple(one for one in get_args(Quantity) if one != "rate")
RATES = (0.1, 10.0)
"""Searched unless asked otherwise, as multiples of the captured rate."""
REPLICAS = (1, 16)
"""Searched unless asked otherwise."""
NEIGHBOURS = 2
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
        around = [value + sign * place * self.step(value) for place in range(1, NEIGHBOURS + 1) for sign in (-1, 1)]
        return [self.rounded(min(max(one, low), high)) for one in around]

    def rounded(self, value: float) -> float:
        return float(round(value)) if self.counts else float(f"{value:.5g}")

    def in_order(self, values: list[float]) -> list[float]:
        return sorted(values, reverse=self.easy > self.hard)


@dataclass(frozen=True, slots=True)
class Target:
    """A limit on a percentile of TTFT, ITL, TPOT or E2E, and the share of members that must keep it."""

    text: str
    metric: Metric
    percentile: float
    limit_ms: float
    cohort: str
    confidence: float


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """Settings of ``sim search``."""

    trace: Path
    model: Path
    quantity: Quantity
    target: Target
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim calibrate")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--minimize", choices=MINIMIZED, help="what to find the least of (required, or --maximize)")
    wanted.add_argument("--maximize", choices=["rate"], help="what to find the most of (required, or --minimize)")
    parser.add_argument(
        "--target",
        required=True,
        metavar="THRESHOLD",
        help="[COHORT.]METRIC.pNN<=LIMIT of ttft, itl, tpot or e2e, such as turns2+.ttft.p90<=500ms",
    )
    parser.add_argument("--confidence", type=float, default=0.9, help="share of the members that keep it")
    parser.add_argument(
        "--between",
        metavar="LOW,HIGH",
        help="where to look, such as 2,8 (default: every cache, rates 0.1 to 10, 1 to 16 replicas)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        help="stop when the result is known to this share of it; 0: to the block",
    )
    add_scenario_flags(parser)
    add_forecast_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    add_page_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Search and print; 1 if no value holds."""
    quantity: Quantity = arguments.minimize or arguments.maximize
    html = page_path(arguments, [arguments.trace, arguments.latency_model])
    found = search(
        SearchConfig(
            trace=arguments.trace,
            model=arguments.latency_model,
            quantity=quantity,
            target=parse_target(arguments.target, arguments.confidence),
            scenario=_only_one(scenarios_of(arguments, searched=quantity), quantity),
            between=None if arguments.between is None else _between(arguments.between, quantity),
            tolerance=_checked_tolerance(arguments.tolerance, quantity),
            paced=arguments.replay_sessions,
            members=checked_members(arguments.members),
            seed=arguments.seed,
        )
    )
    print_result(found, [describe(found)], as_json=arguments.json)
    if html is not None:
        write_page(html, forecastpages.render_search(found))
    return {"found": 0, "all hold": 0, "none holds": 1, "interrupted": 130}[found.outcome]


def search(config: SearchConfig) -> Search:
    model = load_model(config.model)
    captured = read_captured(config.trace, model, paced=config.paced)
    places = summing.cohorts_of(captured.records).get(config.target.cohort)
    if places is None:
        raise InputError(f"--target: the trace has no requests of {config.target.cohort}; expected another cohort")
    low, high = config.between or _widest(captured, config)
    smallest = config.quantity != "rate"
    scale = Scale(*((high, low) if smallest else (low, high)), tolerance=config.tolerance, counts=smallest)
    for end in (low, high):
        plan(captured, _at(config, end))  # refuses settings before any forecast
    own = summing.trust_on(captured, model, ensemble.members(model, config.members, config.seed), config.seed)
    said = [] if own is None else [own.sentence]
    judge = _Judge(config, captured, model)
    outcome: Outcome = "interrupted"
    answer: float | None = None
    try:
        answer = bisect(scale, judge.holds)
        outcome = "none holds" if answer is None else "all hold" if answer == scale.hard else "found"
    except KeyboardInterrupt:
        print(f"sim search: interrupted; {len(judge.evaluated)} values are done", file=sys.stderr)
    return Search(
        trace=config.trace.name,
        trace_digest=captured.digest,
        model_digest=model_digest(model),
        verdict="; ".join([verdict_sentence(config.model, model, captured.digest, captured.meta), *said]),
        trusted=own is None or own.trusted,
        quantity=config.quantity,
        target=config.target.text,
        **{name: getattr(config.target, name) for name in ("metric", "percentile", "limit_ms", "cohort", "confidence")},
        low=low,
        high=high,
        tolerance=config.tolerance,
        scenario=config.scenario.name,
        members=config.members,
        seed=config.seed,
        paced=captured.paced,
        requests=len(places),
        outcome=outcome,
        answer=answer,
        evaluated=sorted(judge.evaluated, key=lambda one: one.value),
        notes=[
            *filter(None, [captured.part_hashed]),
            *engine_warning(model, captured.meta, captured.engine),
            *_notes(judge.evaluated, scale, model),
        ],
        assumptions=list(judge.assumptions),
    )


class _Judge:
    def __init__(self, config: SearchConfig, captured: Captured, model: Model) -> None:
        self.evaluated: list[Evaluated] = []
        self._config, self._captured, self._model = config, captured, model
        self._members = ensemble.members(model, config.members, config.seed)
        self._places = summing.cohorts_of(captured.records)[config.target.cohort]
        self._done = counted(range(sys.maxsize), "forecasts")
        self.assumptions: tuple[str, ...] = ()
        """Of the last value tried."""
        self._point = running.PointRuns(captured, model)

    def holds(self, value: float) -> bool:
        load = plan(self._captured, _at(self._config, value))
        self.assumptions = tuple(load.deployment.assumptions())
        found = running.forecast_load(load, self._members, seed=self._config.seed, done=lambda: next(self._done))
        one = self._evaluated(value, load, found)
        self.evaluated.append(one)
        return one.holds

    def _evaluated(self, value: float, load: Load, found: "Forecast") -> Evaluated:
        target, (demand, horizon_ms, warnings) = self._config.target, self._point(load)
        values_ms, exceeded_ms = self._percentile_ms(found, horizon_ms)
        share = float(np.mean(values_ms <= target.limit_ms))
        return Evaluated(
            value=value,
            latency=summing.span_of(values_ms, exceeded_ms),
            share=share,
            holds=share >= target.confidence and not demand.is_saturated,
            hit_rate=float(np.median(summing.hit_rates(found))),
            utilization=float(demand.utilization) if np.isfinite(demand.utilization) else None,
            saturated=demand.is_saturated,
            warnings=warnings,
        )

    def _percentile_ms(self, found: "Forecast", horizon_ms: float) -> "tuple[FloatArray, float | None]":
        """Return the target's percentile in each member, and what an infinite one of TTFT surely exceeds."""
        target, members = self._config.target, range(found.members)
        if target.metric != "ttft":
            samples = [summing.latencies_ms(found, member, target.metric, self._places) for member in members]
            return np.array([summing.percentile_ms(sample, target.percentile) for sample in samples]), None
        level = np.array([target.percentile])
        own = [summing.ttft_quantiles(found, member, self._places, level, horizon_ms) for member in members]
        exceeded_ms = float(np.median([one.so_far_ms[0] for one in own]))
        return np.array([float(one.values_ms[0]) for one in own]), exceeded_ms


def _at(config: SearchConfig, value: float) -> Scenario:
    """Return the scenario with a value of what is searched. Raises InputError for one that its flag refuses."""
    axis = AXIS_OF[config.quantity]
    return axis.put(config.scenario, axis.read(axis.flag, str(value if config.quantity == "rate" else round(value))))


def _widest(captured: Captured, config: SearchConfig) -> tuple[float, float]:
    if config.quantity == "rate":
        return RATES
    if config.quantity not in ("num-gpu-blocks", "host-blocks"):
        return REPLICAS
    load = plan(captured, _at(config, MOST))
    size = load.engine.block_size
    arrivals = load.arrivals
    held = -(-(arrivals.prompt_tokens + arrivals.output_tokens - 1) // size)[arrivals.runs]
    least = int(held.max(initial=1)) + 1
    return float(least), float(max(load.most_blocks + 1, least))


def _notes(evaluated: Sequence[Evaluated], scale: Scale, model: Model) -> Iterator[str]:
    in_order = {one.value: one.holds for one in evaluated}
    values = scale.in_order(list(in_order))
    failed = next((place for place, value in enumerate(values) if not in_order[value]), len(values))
    beyond = [value for value in values[failed:] if in_order[value]]
    if beyond:
        said = ", ".join(f"{value:g}" for value in beyond)
        yield f"not monotone: the target holds again at {said}, though not at {values[failed]:g}, which is easier"
    yield from ensemble.no_draws(model)


def parse_target(text: str, confidence: float) -> Target:
    """Read ``[COHORT.]ttft.p90<=500ms``. Raises InputError naming the flag."""
    found = parse_threshold("--target", text, metrics=get_args(Metric))
    cohort = found.cohort or ALL
    if (found.op, found.unit, found.key) != ("<=", "ms", None) or found.percentile is None or cohort not in MAIN:
        raise InputError(
            f"--target {text}: expected a percentile of {', '.join(MAIN)} and its limit, such as "
            f"{found.metric}.p90<=500ms"
        )
    if found.metric == "itl" and cohort != ALL:
        raise InputError(f"--target {text}: gaps are not kept by request; expected itl.pNN without {cohort}")
    if found.limit <= 0.0:
        raise InputError(f"--target {text}: expected a limit above 0")
    metric = cast("Metric", found.metric)
    return Target(found.text, metric, found.percentile / 100.0, found.limit, cohort, checked_confidence(confidence))


def _only_one(scenarios: Sequence[Scenario], quantity: Quantity) -> Scenario:
    if len(scenarios) > 1:
        raise InputError(f"{len(scenarios)} scenarios; expected one value of each flag, as {quantity} is varied")
    one = scenarios[0] if scenarios else Scenario({})
    axis = AXIS_OF[quantity]
    if axis.value_in(one) != axis.value_in(AS_CAPTURED):
        raise InputError(f"--{quantity}: it is what is searched; expected --between to limit it")
    return one


def _between(text: str, quantity: Quantity) -> tuple[float, float]:
    try:
        low, high = (float(word) for word in text.split(","))
    except ValueError:
        low = high = 0.0
    whole = low == round(low) and high == round(high)
    least = {"num-gpu-blocks": 2, "rate": 0}.get(quantity, 1)
    if not 0.0 < low < high < float("inf") or (quantity != "rate" and (low < least or not whole)):
        kind = "two numbers above 0" if quantity == "rate" else f"two whole numbers from {least} on"
        raise InputError(f"--between: {text!r}; expected {kind}, the smaller first")
    return low, high


def _checked_tolerance(tolerance: float, quantity: Quantity) -> float:
    least = 1e-4 if quantity == "rate" else 0.0
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
