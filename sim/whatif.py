"""``sim what-if``: what a captured load would have been on another cache, at another rate, under other settings."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from report.cohorts import ALL, FIRST_TURN, LATER_TURNS
from report.survival import CENSORED, EVENT, FAILED, Waits, incidence, make_waits, quantiles, survival_at
from report.whatifresults import LEVELS, Curve, DemandSaid, Measure, Row, Span, WhatIf, ttft
from report.whatifterminal import describe
from sim.alternatives import (
    Alternative,
    Captured,
    Load,
    add_alternative_flags,
    alternatives_of,
    plan,
    read_captured,
)
from sim.compiled import is_compiled
from sim.ensemble import CONFIDENCE, Forecast, forecast, interval, members
from sim.extrapolation import extrapolations, open_parameters
from sim.interning import Int64Array
from sim.kernels import layout
from sim.model import Model, load_model, model_digest
from sim.saturation import Demand, PointRun, demand_of, run_point
from sim.timeline import Floats
from tracefile import InputError, Record
from tracefile.progress import counted

POINTS = 160
"""Of a survival curve."""


@dataclass(frozen=True, slots=True)
class WhatIfConfig:
    """What ``sim what-if`` was asked."""

    trace: Path
    model: Path
    alternatives: tuple[Alternative, ...]
    paced: bool | None = None
    """None: if the trace knows its sessions."""
    members: int = 32
    seed: int = 0
    json: bool = False
    page: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sim what-if``."""
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--model", type=Path, required=True, help="model.json from sim fit")
    add_alternative_flags(parser)
    add_forecast_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write one self-contained HTML page")


def add_forecast_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that forecasts a load many times over."""
    parser.add_argument(
        "--replay-sessions",
        action=argparse.BooleanOptionalAction,
        help="a turn comes its think time after its parent's predicted end, or at its recorded offset; default: the "
        "former where the trace has sessions",
    )
    parser.add_argument("--members", type=int, default=32, metavar="N", help="forecasts of each load (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the members and their noise (default 0)")


def run(arguments: argparse.Namespace) -> int:
    """Forecast the capture and each alternative, and say what differs."""
    config = WhatIfConfig(
        trace=arguments.trace,
        model=arguments.model,
        alternatives=tuple(alternatives_of(arguments)),
        paced=arguments.replay_sessions,
        members=checked_members(arguments.members),
        seed=arguments.seed,
        json=arguments.json,
        page=arguments.html,
    )
    result, finished = forecast_alternatives(config)
    if config.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        print(describe(result))
    if config.page is not None:
        write_page(config.page, result)
    return 0 if finished else 130


def forecast_alternatives(config: WhatIfConfig) -> tuple[WhatIf, bool]:
    """The rows that were asked for, the capture's first; and whether all are there: Ctrl-C keeps what was done."""
    model = load_model(config.model)
    captured = read_captured(config.trace, model, paced=config.paced)
    loads = [plan(captured, alternative) for alternative in (Alternative({}), *config.alternatives)]
    say_if_not_compiled()
    drawn = members(model, config.members, config.seed)
    cohorts = cohorts_of(captured.records)
    rows: list[Row] = []
    finished = True
    try:
        base: _Outlook | None = None
        runs = counted(range(len(loads) * config.members), "forecasts")
        for load in loads:
            found = forecast(load.arrivals, load.engine, drawn, seed=config.seed, done=lambda: next(runs, None))
            one = _look(load, found, model, cohorts, paced=captured.paced)
            base = base or one
            rows.append(_row(one, base, model))
    except KeyboardInterrupt:
        finished = False
        if not rows:
            raise
        print(f"sim what-if: interrupted; {len(rows)} of {len(loads)} rows are done", file=sys.stderr)
    result = WhatIf(
        trace=config.trace.name,
        trace_digest=captured.digest,
        model_digest=model_digest(model),
        members=config.members,
        seed=config.seed,
        confidence=CONFIDENCE,
        paced=captured.paced,
        requests=len(captured.records),
        cohorts={name: len(places) for name, places in cohorts.items()},
        notes=list(_notes(captured, model, config.alternatives)),
        rows=rows,
    )
    return result, finished


def checked_members(members: int) -> int:
    """``--members``. Raises InputError: with fewer than two nothing is known of a spread."""
    if members < 2:
        raise InputError(f"--members: {members}; expected 2 or more")
    return members


def say_if_not_compiled() -> None:
    """The first forecast of an installation takes longer; a reader who waits should know why."""
    if not is_compiled():
        print("sim: compiling the simulator, once for this installation (about 20 s) …", file=sys.stderr, flush=True)


def write_page(path: Path, result: WhatIf) -> None:
    """Write the result as a page. Raises InputError if it cannot be written."""
    from report.whatifpage import render_what_if  # noqa: PLC0415 - plotly, jinja: only who wants a page waits for them

    try:
        path.write_text(render_what_if(result), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html: {path}: {error.strerror}; expected a writable path") from None
    print(f"page: {path}", file=sys.stderr)


def cohorts_of(records: Sequence[Record]) -> dict[str, Int64Array]:
    """Places of all requests, of first turns and of later ones; the last two where the trace knows turns."""
    turns = np.array([record.turn or 0 for record in records])
    found = {
        ALL: np.arange(len(records)),
        FIRST_TURN: np.flatnonzero(turns == 1),
        LATER_TURNS: np.flatnonzero(turns > 1),
    }
    return {name: places for name, places in found.items() if len(places)}


def first_token_waits(found: Forecast, member: int, places: Int64Array) -> Waits:
    """TTFT of a member's requests, each waited for to its end."""
    arrival_ms, ttft_ms, e2e_ms = (part[member, places] for part in (found.arrival_ms, found.ttft_ms, found.e2e_ms))
    came = ~np.isnan(ttft_ms)
    gave_up = ~came & (found.outcome[member, places] == layout.ABORTED)
    end = np.where(came, EVENT, np.where(gave_up, CENSORED, FAILED)).astype(np.int8)
    time_ms = np.where(came, ttft_ms, e2e_ms)
    tells = ~np.isnan(arrival_ms) & ~np.isnan(time_ms)
    return make_waits(time_ms[tells], end[tells], places[tells])


@dataclass(frozen=True, slots=True)
class TtftQuantiles:
    """Of one member's requests."""

    waits: Waits
    values_ms: Floats
    """By level; infinite where fewer requests than that had their first token by the horizon: in a line that grows the
    rest of the curve depends on how long the run is."""
    so_far_ms: Floats
    """By level: what is surely exceeded where the value is infinite, the quantile of the waits up to the horizon."""
    until_ms: float
    """Up to where the curve is told."""


def ttft_quantiles(
    found: Forecast, member: int, places: Int64Array, levels: Floats, horizon_ms: float = np.inf
) -> TtftQuantiles:
    """TTFT quantiles that do not depend on what comes after ``horizon_ms``."""
    waits = first_token_waits(found, member, places)
    share = incidence(waits)
    values_ms = quantiles(waits, share, levels)
    left_ms = np.maximum(horizon_ms - found.arrival_ms[member, waits.row], 0.0)
    came = (waits.end == EVENT) & (waits.time_ms <= left_ms)
    so_far_ms = np.quantile(np.minimum(waits.time_ms, left_ms), levels, method="inverted_cdf") if len(waits) else levels
    events_ms = waits.time_ms[waits.end == EVENT]
    until_ms = float(events_ms[-1]) if len(events_ms) else 0.0
    if np.isfinite(horizon_ms) and len(waits):
        told = float(came.mean())
        values_ms = np.where(levels <= told, values_ms, np.inf)
        until_ms = min(until_ms, float(quantiles(waits, share, np.array([told]))[0]))
    return TtftQuantiles(waits, values_ms, so_far_ms, until_ms)


@dataclass(frozen=True, slots=True)
class _Outlook:
    """An alternative with all that is known of it: values by member."""

    load: Load
    demand: Demand
    run: PointRun
    values: dict[str, Floats]
    beyond: dict[str, float]
    """Of values that may be infinite: what they exceed."""
    curves: dict[str, Curve]


def _look(load: Load, found: Forecast, model: Model, cohorts: Mapping[str, Int64Array], *, paced: bool) -> _Outlook:
    point = run_point(load.arrivals, load.engine, model)
    demand = demand_of(point, load.arrivals, load.engine, model)
    horizon_ms = load.horizon_ms if demand.is_saturated and not paced else np.inf
    values, beyond, curves = _engine_values(found), {}, {}
    levels = np.array(list(LEVELS.values()))
    for cohort, places in cohorts.items():
        by_member = [ttft_quantiles(found, member, places, levels, horizon_ms) for member in range(found.members)]
        for number, level in enumerate(LEVELS):
            name = ttft(cohort, level)
            values[name] = np.array([one.values_ms[number] for one in by_member])
            beyond[name] = float(np.median([one.so_far_ms[number] for one in by_member]))
        curves[cohort] = _curve(by_member, stops=bool(np.isfinite(horizon_ms)))
    return _Outlook(load, demand, point, values, beyond, curves)


def _curve(by_member: Sequence[TtftQuantiles], *, stops: bool) -> Curve:
    waits, last_ms = [one.waits for one in by_member], float(np.median([one.until_ms for one in by_member]))
    first_ms = max(min(float(one.time_ms[0]) if len(one) else 1.0 for one in waits), 1e-3)
    grid_ms = np.geomspace(first_ms, max(last_ms, first_ms), POINTS)
    waiting = np.array([survival_at(one, incidence(one), grid_ms) for one in waits])
    bands = [interval(column) for column in waiting.T]
    return Curve(
        time_ms=[round(time_ms, 3) for time_ms in grid_ms.tolist()],
        middle=[round(band.middle, 5) for band in bands],
        low=[round(band.low, 5) for band in bands],
        high=[round(band.high, 5) for band in bands],
        stops=stops and bands[-1].high > 0.0,
    )


def hit_rates(found: Forecast) -> Floats:
    """By member: cached share of the prompt tokens of the requests that were admitted."""
    prompts = np.array([arrival.prompt_tokens for arrival in found.arrivals])
    admitted = found.cached_tokens >= 0
    looked_up, hit = (admitted * prompts).sum(axis=1), np.where(admitted, found.cached_tokens, 0).sum(axis=1)
    return np.asarray(hit / np.maximum(looked_up, 1))


def _engine_values(found: Forecast) -> dict[str, Floats]:
    """What is not a TTFT, by member."""
    ends_ms = found.arrival_ms + found.e2e_ms
    seconds = (np.nanmax(ends_ms, axis=1) - np.nanmin(found.arrival_ms, axis=1)) / 1e3
    served = (found.outcome == layout.OK).sum(axis=1)
    values = {
        "hit_rate": hit_rates(found),
        "requests_per_s": served / seconds,
        "output_tokens_per_s": found.output_tokens.sum(axis=1) / seconds,
        "preemptions": found.preemptions.sum(axis=1).astype(np.float64),
        "unserved": np.isin(found.outcome, (layout.UNSERVABLE, layout.PARENT_FAILED)).sum(axis=1).astype(np.float64),
    }
    levels = list(LEVELS.values())
    for name, rows in (("queue", list(found.queue_ms)), ("itl", found.gaps_ms), ("e2e", list(found.e2e_ms))):
        at_levels = np.array([_order_statistics(row, levels) for row in rows])
        values |= {f"{name}.{level}": column for level, column in zip(LEVELS, at_levels.T, strict=True)}
    return values


def _order_statistics(values: Floats, levels: Sequence[float]) -> Floats:
    known = values[~np.isnan(values)]
    return np.quantile(known, levels, method="inverted_cdf") if len(known) else np.full(len(levels), np.nan)


def _row(one: _Outlook, base: _Outlook, model: Model) -> Row:
    alternative, is_base = one.load.alternative, one is base
    return Row(
        name=alternative.name,
        settings=dict(alternative.settings),
        rate=alternative.rate,
        cold_prompts=alternative.cold_prompts,
        num_gpu_blocks=one.load.engine.num_gpu_blocks,
        measures={name: _measure(name, one, None if is_base else base) for name in one.values},
        demand=_said(one.demand),
        warnings=list(
            open_parameters(model, one.run)
            if is_base
            else extrapolations(model, base.run, one.run, base.load.engine, one.load.engine)
        ),
        curves=one.curves,
    )


def _measure(name: str, one: _Outlook, base: _Outlook | None) -> Measure:
    values, beyond = one.values[name], one.beyond.get(name)
    if base is None:
        return Measure(value=span_of(values, beyond))
    before = base.values[name]
    with np.errstate(invalid="ignore", divide="ignore"):
        difference, ratio = values - before, np.where(before > 0.0, values / before, np.nan)
    middle = interval(before).middle
    known = beyond is not None and np.isfinite(middle)
    return Measure(
        value=span_of(values, beyond),
        difference=span_of(difference, (beyond or 0.0) - middle if known else None),
        ratio=span_of(ratio, (beyond or 0.0) / middle if known and middle > 0.0 else None),
    )


def span_of(values: Floats, beyond: float | None) -> Span:
    """The members' values as they are written; ``beyond``: what is written for one past the end of a curve."""
    found = interval(values)
    return Span(
        middle=_finite(found.middle),
        low=_finite(found.low),
        high=_finite(found.high),
        beyond=beyond if found.middle == np.inf else None,
    )


def _finite(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


def _said(demand: Demand) -> DemandSaid:
    return DemandSaid(
        load=_finite(demand.load),
        prefill=_finite(demand.prefill),
        decode=_finite(demand.decode),
        frontend=_finite(demand.frontend),
        yield_at_most=_finite(demand.yield_at_most),
        in_flight_growth_per_s=_finite(demand.in_flight_growth_per_s),
        in_flight_at_end=demand.in_flight_at_end,
        saturated=demand.is_saturated,
    )


def _notes(captured: Captured, model: Model, alternatives: Sequence[Alternative]) -> Iterator[str]:
    rates = any(alternative.rate != 1.0 for alternative in alternatives)
    if captured.paced:
        yield "later turns wait for the answers before them, then think as long as recorded" + (
            "; a rate multiplies the sessions that begin in a second" if rates else ""
        )
    else:
        yield "open loop: every request comes at its recorded offset" + (
            ", divided by the rate: think times between turns shrink with it" if rates else ""
        )
    if not model.draws:
        yield "the model has no draws of its parameters (fit it again): intervals hold noise and drift only"
    if any(record.status not in ("ok", "error") for record in captured.records):
        yield "clients that gave up give up after as long a wait here"
    if captured.engine != model.engine:
        own, fitted = asdict(captured.engine), asdict(model.engine)
        said = [f"{name} {own[name]} (fitted under {fitted[name]})" for name in own if own[name] != fitted[name]]
        yield f"settings as the capture tells them: {', '.join(said)}"
