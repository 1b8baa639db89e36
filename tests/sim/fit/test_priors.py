"""Defaults of open terms, in the regression for the identified terms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.fit.observations import Observations
from sim.fit.priors import default_priors
from sim.fit.regression import bootstrap, solve
from sim.latency.stepcost import DECODES, KV_TOKENS, PREFILL_TOKENS, STEPS
from sim.latency.terms import TERMS

FREE = [STEPS, PREFILL_TOKENS, DECODES, KV_TOKENS]


def observed(costs: dict[int, float], seed: int, spread: float = 0.0, rows: int = 120) -> Observations:
    """Durations of random steps at these costs, times a log-normal factor each; four per session."""
    random = np.random.default_rng(seed)
    counts = np.zeros((rows, len(TERMS)))
    counts[:, STEPS] = 1.0
    counts[::2, PREFILL_TOKENS] = random.integers(1, 2_000, rows // 2)
    counts[:, DECODES] = random.integers(0, 8, rows)
    counts[:, KV_TOKENS] = counts[:, DECODES] * random.integers(10, 9_000, rows)
    counts[:, [position for position in FREE if position not in costs]] = 0.0
    truth = np.zeros(len(TERMS))
    truth[list(costs)] = list(costs.values())
    return Observations(
        start_ms=np.linspace(0.0, 1e5, rows),
        measured_ms=counts @ truth * np.exp(spread * random.standard_normal(rows)),
        counts=counts,
        is_prefill=counts[:, PREFILL_TOKENS] > 0.0,
        opens=np.zeros(rows, np.bool_),
        steps=np.ones(rows, np.int64),
        session=np.arange(rows) // 4,
        capture=np.zeros(rows, np.int64),
    )


COSTS = st.fixed_dictionaries(
    {
        STEPS: st.floats(0.5, 50.0),
        PREFILL_TOKENS: st.floats(1e-3, 1.0),
        DECODES: st.floats(0.01, 5.0),
        KV_TOKENS: st.floats(1e-6, 1e-3),
    }
)


@given(costs=COSTS, seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_default_is_a_regularization_row(costs: dict[int, float], seed: int) -> None:
    """Equal to the stacked least-squares system, solved without normal equations."""
    names = ["per_decode_ms", "per_kv_token_ms", "frontend_base_ms"]
    parameters = np.zeros(len(TERMS))
    parameters[list(costs)] = list(costs.values())
    assumed = default_priors(names, parameters)
    random = np.random.default_rng(seed)
    rows, targets = random.random((40, 4)), random.random(40)
    more, of_it = assumed.equations(FREE, sessions=7)
    stacked = np.vstack([rows, assumed.rows[:, FREE] / (assumed.spreads_ms * np.sqrt(7))[:, None]])
    of_them = np.concatenate([targets, assumed.targets_ms / (assumed.spreads_ms * np.sqrt(7))])
    oracle = np.linalg.lstsq(stacked, of_them, rcond=None)[0]
    assert np.linalg.solve(rows.T @ rows + more, rows.T @ targets + of_it) == pytest.approx(oracle, rel=1e-4, abs=1e-9)


def test_term_without_counts_has_the_default() -> None:
    costs = {STEPS: 10.0, PREFILL_TOKENS: 0.02}
    seen = observed(costs, seed=1)
    assumed = default_priors(["per_decode_ms", "prefill_step_ms"], solve(seen, FREE).parameters)
    parameters = solve(seen, FREE, assumed).parameters
    assert parameters[DECODES] == pytest.approx(1.0)
    assert parameters[[STEPS, PREFILL_TOKENS]] == pytest.approx([10.0, 0.02])
    draws = bootstrap(seen, solve(seen, FREE).weights, FREE, 200, 0, assumed=assumed)[:, DECODES]
    assert np.mean(draws) == pytest.approx(1.08, abs=0.15)  # of a deviation of 1, cut at 0
    assert np.std(draws) == pytest.approx(0.78, abs=0.15)
