"""Which terms beyond the default ones a fit takes in: those that make it predict captures that it has not seen.

A term that is one of several that grow together fits the captures it was solved on better whether it is there or not.
So each is judged across captures: solved on all but one, scored on the one left out, by the stretches of time that were
seen and by the TTFTs of a run of its own; with a single capture, across five parts of its sessions, by the stretches
alone. The term that helps most comes in, as long as it helps by enough and in most of the folds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sim.fit.capturedschedule import Reconstruction
from sim.fit.observations import Observations
from sim.fit.regression import solve
from sim.fit.variants import Capture, Fit, columns_of, default_terms, fit_variant, forecast, group_losses
from sim.latency.terms import EXTRA_TERMS
from tracefile.commandline.progress import counted
from tracefile.records.arrays import FloatArray, IntArray

FOLDS = 5
"""Parts of a single capture."""
LEAST_GAIN = 0.01
"""A term must lower the loss on what was left out by this share of it."""
TtftLoss = Callable[[int, FloatArray], float]
"""Of a fold's own run with parameters that were solved without it; NaN: it has none."""
ROUNDS = 3
"""Of choosing: what a shared core's front end did when follows from the terms, and these from that."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of terms across the folds."""

    extra_terms: tuple[str, ...]
    losses: tuple[float, ...]
    """Per fold: on what was left out, mean |log(seen / predicted)| of prefills, of decodes and of TTFTs, averaged."""

    @property
    def loss(self) -> float:
        """Mean over the folds."""
        return float(np.mean(self.losses))


def with_chosen_terms(
    fit: Fit, captures: Sequence[Capture], schedules: Sequence[Reconstruction]
) -> tuple[Fit, list[Trial]]:
    """The same variant with the terms that help it, and the trials of the last round."""

    def ttft_loss(fold: int, parameters: FloatArray) -> float:
        if len(captures) == 1:  # a part of its sessions does not run by itself
            return float("nan")
        return forecast(captures[fold : fold + 1], parameters, fit.variant).loss

    trials: list[Trial] = []
    for _ in range(ROUNDS if fit.variant.placement == "shared_core" else 1):
        trials = choose_terms(fit.seen, ttft_loss)
        terms = default_terms(trials[-1].extra_terms)
        if terms == fit.terms:
            break
        fit = fit_variant(captures, schedules, fit.variant, terms)
    return fit, trials


def choose_terms(seen: Observations, ttft_loss: TtftLoss) -> list[Trial]:
    """Every set that was tried, the chosen one last."""
    folds = _folds(seen)
    best = _try(seen, folds, (), ttft_loss)
    trials = [best]
    while True:
        names = [
            name for name in EXTRA_TERMS if name not in best.extra_terms and seen.counts[:, columns_of((name,))].any()
        ]
        more = [_try(seen, folds, (*best.extra_terms, name), ttft_loss) for name in counted(names, "terms")]
        trials += more
        better = min(more, key=lambda trial: trial.loss, default=best)
        if not _is_better(better, best):
            break
        best = better
    return [*(trial for trial in trials if trial is not best), best]


def _is_better(trial: Trial, than: Trial) -> bool:
    gains = np.array(than.losses) - np.array(trial.losses)
    return trial.loss <= (1.0 - LEAST_GAIN) * than.loss and bool((gains > 0.0).sum() * 2 > len(gains))


def _folds(seen: Observations) -> IntArray:
    """By observation: in which fold it is left out."""
    return seen.capture if seen.capture.max(initial=0) > 0 else seen.session % FOLDS


def _try(seen: Observations, folds: IntArray, extra_terms: Sequence[str], ttft_loss: TtftLoss) -> Trial:
    free = columns_of(default_terms(extra_terms))
    losses = []
    for fold in range(int(folds.max(initial=0)) + 1):
        kept, left = seen.select(folds != fold), seen.select(folds == fold)
        if len(kept.seen_ms) and len(left.seen_ms):
            parameters = solve(kept, free).parameters
            losses.append(float(np.nanmean([*group_losses(left, parameters), ttft_loss(fold, parameters)])))
    return Trial(tuple(extra_terms), tuple(losses) or (float("inf"),))
