"""Priors on the costs of prefill, decode and the API server that captures do not identify.

An identified term has no prior: its cost depends on the captures alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.latency.terms import TERMS, column
from tracefile.records.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class Default:
    """Expected cost of a term: ``ratio`` times the cost of term ``of``; None: ``ratio``."""

    ratio: float
    of: str | None = None

    def __str__(self) -> str:
        return f"{self.ratio:g}" if self.of is None else f"{self.ratio:g} × {self.of}"


DEFAULTS: Mapping[str, Default] = {
    "per_attention_token2_ms": Default(1e-3, "per_prefill_token_ms"),
    "per_decode_ms": Default(0.1, "t0_ms"),
    "per_kv_token_ms": Default(4.0, "per_attention_token2_ms"),
    "frontend_base_ms": Default(0.5, "t0_ms"),
    "frontend_ms_per_prompt_token": Default(1e-3),
}
"""Default values of terms in every fit, rounded from fits of two engines (docs/dev/fit.md). Extra terms: 0. Steps
and prompt tokens have none: other defaults are multiples of their terms. The regression ties repeated KV reads to
first reads."""


@dataclass(frozen=True, slots=True)
class Priors:
    """Priors of a regression; each of m rows has columns in the order of ``TERMS``."""

    rows: FloatArray = field(default_factory=lambda: np.zeros((0, len(TERMS))))
    """``rows @ costs`` is expected to be ``targets_ms``; shape (m, terms)."""
    targets_ms: FloatArray = field(default_factory=lambda: np.zeros(0))
    spreads_ms: FloatArray = field(default_factory=lambda: np.zeros(0))
    """Standard deviation from the target; positive."""

    def equations(
        self, free: list[int], sessions: int, scores: FloatArray | float = 0.0
    ) -> tuple[FloatArray, FloatArray]:
        """Return the priors' part of the normal equations of columns ``free``, each weighted as one of ``sessions``.

        ``scores``: errors of the targets in spreads, as a bootstrap draws them.
        """
        rows, weights = self.rows[:, free], 1.0 / (sessions * self.spreads_ms**2)
        targets_ms = self.targets_ms + scores * self.spreads_ms
        return (rows * weights[:, None]).T @ rows, (rows * weights[:, None]).T @ targets_ms


NO_ASSUMPTIONS = Priors()


def default_priors(open_names: Sequence[str], parameters: FloatArray) -> Priors:
    """Return the priors of ``open_names``; ``parameters`` give each default its scale."""
    rows, targets_ms, spreads_ms = [], [], []
    for name in open_names:
        index, default = column(name), DEFAULTS.get(name, Default(0.0) if not TERMS[column(name)].default else None)
        if default is None:
            continue
        row = np.zeros(len(TERMS))
        row[index] = 1.0
        expected_ms = default.ratio
        if default.of is not None:
            row[column(default.of)] = -default.ratio
            expected_ms *= float(parameters[column(default.of)])
        spread_ms = expected_ms or float(parameters[index])
        if spread_ms > 0.0:
            rows.append(row)
            targets_ms.append(0.0 if default.of is not None else expected_ms)
            spreads_ms.append(spread_ms)
    return Priors(np.array(rows).reshape(-1, len(TERMS)), np.array(targets_ms), np.array(spreads_ms))
