"""Which terms beyond the default ones a fit takes in: those that make it predict captures that it has not seen.

A term that is one of several that grow together fits the captures it was solved on better whether it is there or not.
So each is judged across captures: solved on all but one, scored on the one left out; with a single capture, on five
parts of its sessions. The term that helps most comes in, as long as it helps by enough and in most of the folds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.features import EXTRA_TERMS
from sim.observations import Ints, Observations
from sim.regression import solve
from sim.variants import columns_of, default_terms, group_losses

FOLDS = 5
"""Parts of a single capture."""
LEAST_GAIN = 0.02
"""A term must lower the loss on what was left out by this share of it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of terms across the folds."""

    extra_terms: tuple[str, ...]
    losses: tuple[float, ...]
    """Per fold: on what was left out, mean |log(seen / predicted)| of prefills and of decodes, averaged."""

    @property
    def loss(self) -> float:
        """Mean over the folds."""
        return float(np.mean(self.losses))


def choose_terms(seen: Observations, given: tuple[str, ...] = ()) -> list[Trial]:
    """Every set that was tried, the chosen one last; ``given``: terms that are in anyway."""
    folds = _folds(seen)
    best = _try(seen, folds, given)
    trials = [best]
    while True:
        more = [
            _try(seen, folds, (*best.extra_terms, name))
            for name in EXTRA_TERMS
            if name not in best.extra_terms and seen.counts[:, columns_of((name,))].any()
        ]
        trials += more
        better = min(more, key=lambda trial: trial.loss, default=best)
        if not _is_better(better, best):
            break
        best = better
    return [*(trial for trial in trials if trial is not best), best]


def _is_better(trial: Trial, than: Trial) -> bool:
    gains = np.array(than.losses) - np.array(trial.losses)
    return trial.loss <= (1.0 - LEAST_GAIN) * than.loss and bool((gains > 0.0).sum() * 2 > len(gains))


def _folds(seen: Observations) -> Ints:
    """By observation: in which fold it is left out."""
    return seen.capture if seen.capture.max(initial=0) > 0 else seen.session % FOLDS


def _try(seen: Observations, folds: Ints, extra_terms: Sequence[str]) -> Trial:
    free = columns_of(default_terms(extra_terms))
    losses = []
    for fold in range(int(folds.max(initial=0)) + 1):
        kept, left = seen.select(folds != fold), seen.select(folds == fold)
        if len(kept.seen_ms) and len(left.seen_ms):
            losses.append(float(np.nanmean(group_losses(left, solve(kept, free).parameters))))
    return Trial(tuple(extra_terms), tuple(losses) or (float("inf"),))
