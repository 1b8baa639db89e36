"""Costs that a fit borrows from a model of the same engine, for terms that its captures do not identify.

A borrowed cost is the lender's at the captures' pace. Steps do not tell the pace of an API server on a core of its own:
first tokens of an idle engine do, and without them its costs are the lender's, with intervals that reach to the pace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, log
from pathlib import Path

import numpy as np

from measure.scores import ndtri, stdtrit
from sim.fit.assumptions import Assumptions
from sim.fit.drift import INTERVAL, widened
from sim.fit.observations import Observations
from sim.fit.pace import Pace, measure_pace
from sim.fit.regression import LARGE_FRONT, LEAST_OPENINGS
from sim.latency.modelfile import Model, load_model
from sim.latency.terms import EXTRA_TERMS, KV_TOKENS, NUM_STEP_TERMS, REPEATED_KV_TOKENS, TERMS, column
from sim.vllm.config import EngineConfig
from tracefile.records.errors import InputError

_FIRST, _REPEATED = TERMS[KV_TOKENS].name, TERMS[REPEATED_KV_TOKENS].name


@dataclass(frozen=True, slots=True)
class Lender:
    """A model of the same engine."""

    model: Model
    name: str
    """For messages: the model's file."""

    @property
    def extra_terms(self) -> tuple[str, ...]:
        return tuple(name for name in EXTRA_TERMS if name in self.model.parameters)

    def lends(self, name: str) -> bool:
        """Return whether the lender knows a term: from its captures, from a lender of its own, or as it was given."""
        parameter = self.model.parameters.get(name)
        known = parameter is not None and (parameter.identified or parameter.borrowed)
        return known or (name == _REPEATED and self.lends(_FIRST))


def read_lender(path: Path) -> Lender:
    return Lender(load_model(path), path.name)


def check_same_engine(lender: Lender, engine: EngineConfig, model_name: str | None, trace: str) -> None:
    """Raise InputError unless the lender is of these settings and of this served model."""
    own = lender.model.model_name
    others = [] if None in (own, model_name) or own == model_name else [f"model {model_name}, not {own}"]
    if others := [*others, *lender.model.other_settings(engine)]:
        raise InputError(
            f"--borrow-from {lender.name}: {trace} is of other settings ({'; '.join(others)}); expected a model of the "
            "same engine"
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Factor of a lender's costs, and its error at the ends of a 95 % interval of its log."""

    factor: float
    reach: float
    note: str
    """In words; empty: nothing tells of these costs, and the factor is 1."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Borrowed costs."""

    lender: Lender
    names: tuple[str, ...]
    pace: Pace
    server: Scale
    """Of an API server on a core of its own."""
    assumed: Assumptions

    def note(self, name: str) -> str:
        """Return the origin of a borrowed cost in words."""
        scale = _scale(name, self.lender, self.pace, self.server)
        return f"borrowed from {self.lender.name}" + (f" × {scale.factor:.3f}, {scale.note}" if scale.note else "")

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return the lender's interval, scaled, and wider by the drift of a whole capture; None: it has none."""
        return _lent_interval(name, self.lender, _scale(name, self.lender, self.pace, self.server))


def borrow(
    lender: Lender,
    open_names: Sequence[str],
    own_intervals: Mapping[str, tuple[float, float]],
    seen: Observations,
    trace: str,
    *,
    rounds: int,
    seed: int,
) -> Loan:
    """Hold the costs that the lender knows better, those of ``open_names`` among them; a draw for each of ``rounds``.

    It knows a cost better if its interval, which drift widens, is the narrower one and overlaps the captures'
    (``own_intervals``, of every term). Where both are apart, the engine has changed, and the captures decide. A lender
    of one capture cannot tell its drift: it lends open terms alone.

    The draws are the lender's. They vary by a common factor, too, the drift between the lender's captures, and by the
    error of their scale.
    """
    pace = measure_pace(seen, lender.model, trace)
    server = _server_scale(lender, pace, seen)
    lent = {name: _lent_interval(name, lender, _scale(name, lender, pace, server)) for name in own_intervals}
    several = len(lender.model.fitted_on) > 1
    looser = {name for name, own in own_intervals.items() if several and _is_looser(own, lent[name])}
    names = tuple(name for name in own_intervals if lender.lends(name) and (name in open_names or name in looser))
    places = {name: place for place, name in enumerate(lender.model.parameters)}
    random = np.random.default_rng((seed & 0xFFFFFFFFFFFFFFFF, 1))
    drifts = lender.model.drift_log_sd * random.standard_normal(rounds)
    errors = {True: random.standard_normal(rounds), False: random.standard_normal(rounds)}
    rows = np.array(lender.model.draws or [[one.value for one in lender.model.parameters.values()]])
    rows = rows[random.integers(0, len(rows), rounds)]
    costs, draws = dict[int, float](), np.zeros((rounds, len(TERMS)))
    for name in names:
        place, scale = column(name), _scale(name, lender, pace, server)
        costs[place] = lender.model.costs[place] * scale.factor
        off = drifts + errors[scale is server] * scale.reach / float(ndtri(INTERVAL[1]))
        # Without a cost of their own, repeated KV reads cost as much as first ones.
        draws[:, place] = rows[:, places.get(name, places.get(_FIRST, 0))] * scale.factor * np.exp(off)
    return Loan(lender, names, pace, server, Assumptions(costs, draws))


def _lent_interval(name: str, lender: Lender, scale: Scale) -> tuple[float, float] | None:
    known = lender.model.parameters.get(name) or lender.model.parameters.get(_FIRST)
    if known is None or known.low is None or known.high is None:
        return None
    reach = hypot(scale.reach, _drift_at_end(lender.model))
    return widened(known.value * scale.factor, known.low * scale.factor, known.high * scale.factor, reach)


def _is_looser(own: tuple[float, float], lent: tuple[float, float] | None) -> bool:
    if lent is None:
        return False
    return own[1] - own[0] > lent[1] - lent[0] and own[0] <= lent[1] and lent[0] <= own[1]


def _scale(name: str, lender: Lender, pace: Pace, server: Scale) -> Scale:
    """Return the scale of the core that does a term's work."""
    is_server = TERMS[column(name)].work in ("reception", "delivery")
    if is_server and lender.model.frontend_placement != "shared_core":
        return server
    return Scale(pace.factor, pace.reach, "the captures' pace")


def _server_scale(lender: Lender, pace: Pace, seen: Observations) -> Scale:
    """Return an API server's time over the lender's, from first tokens of an idle engine that are largely its work."""
    costs = np.array(lender.model.costs)
    front_ms = seen.counts[:, NUM_STEP_TERMS:] @ costs[NUM_STEP_TERMS:]
    steps_ms = pace.factor * (seen.counts[:, :NUM_STEP_TERMS] @ costs[:NUM_STEP_TERMS])
    rows = seen.opens & (front_ms >= LARGE_FRONT * (front_ms + steps_ms))
    if rows.sum() < LEAST_OPENINGS:
        return Scale(1.0, abs(log(pace.factor)), "")
    ratio = np.sort((seen.seen_ms[rows] - steps_ms[rows]) / front_ms[rows])
    middle = float(np.median(ratio))
    low, high = np.quantile(ratio, [0.1587, 0.8413])
    error = 1.2533 * float(high - low) / 2.0 / float(np.sqrt(rows.sum()))  # of a median
    if middle <= 4.0 * error:
        return Scale(1.0, abs(log(pace.factor)), "")
    return Scale(middle, float(ndtri(INTERVAL[1])) * error / middle, "the captures' API server")


def _drift_at_end(model: Model) -> float:
    """Drift of log(speed) at the ends of ``INTERVAL``."""
    score = stdtrit(model.drift_freedom, INTERVAL[1]) if model.drift_freedom else ndtri(INTERVAL[1])
    return float(score) * model.drift_log_sd
