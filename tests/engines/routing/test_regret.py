"""Regret against the oracle: its parts, its reason, and a prefix's engines."""

from hypothesis import given
from hypothesis import strategies as st

from engines.routing.costs import EngineTruth, RegretAccount, regret_of

FREE_COLD = EngineTruth(wait_ms=0.0, prefill_ms=100.0, cached_tokens=0)
BUSY_WARM = EngineTruth(wait_ms=60.0, prefill_ms=20.0, cached_tokens=800)
FREE_TUNED = EngineTruth(wait_ms=0.0, prefill_ms=100.0, cached_tokens=0, adapter_ms=50.0)


def test_the_oracles_engine_has_no_regret() -> None:
    regret = regret_of(3, 1, [FREE_COLD, BUSY_WARM])
    assert (regret.oracle_place, regret.regret_ms, regret.reason, regret.forgone_tokens) == (1, 0.0, "none", 0)
    # Of equals the chosen one is as good.
    assert regret_of(3, 1, [FREE_COLD, FREE_COLD]).oracle_place == 1


def test_a_loss_has_parts_that_add_up_and_the_largest_is_its_reason() -> None:
    lost = regret_of(0, 0, [FREE_COLD, BUSY_WARM])
    assert (lost.regret_ms, lost.wait_ms, lost.prefill_ms) == (20.0, -60.0, 80.0)
    assert (lost.reason, lost.forgone_tokens) == ("prefix spread", 800)
    assert regret_of(0, 0, [FREE_COLD, BUSY_WARM], home=1).reason == "session moved"
    assert regret_of(0, 0, [FREE_COLD, BUSY_WARM], believed_tokens=800.0, home=0).reason == "index wrong"
    waited = regret_of(0, 0, [EngineTruth(90.0, 20.0, 800), BUSY_WARM])
    assert (waited.regret_ms, waited.reason, waited.forgone_tokens) == (30.0, "queue met", 0)
    assert regret_of(0, 1, [FREE_COLD, FREE_TUNED]).reason == "adapter loaded"


def test_an_account_sums_by_reason_and_counts_engines_of_a_prefix() -> None:
    account = RegretAccount()
    account.add(regret_of(0, 0, [FREE_COLD, BUSY_WARM]), [7, 8])
    account.add(regret_of(1, 1, [FREE_COLD, BUSY_WARM]), [7, 9])
    account.add(regret_of(2, 1, [FREE_COLD, FREE_TUNED]), [5])
    account.add(regret_of(3, 1, [FREE_COLD, FREE_TUNED]), [])
    assert account.regrets_ms == [20.0, 0.0, 50.0, 50.0]
    assert account.requests == {"none": 1, "prefix spread": 1, "adapter loaded": 2}
    assert account.lost_ms == {"none": 0.0, "prefix spread": 20.0, "adapter loaded": 100.0}
    assert account.forgone_tokens == 800
    assert account.engines_per_prefix == 2.0  # key 5 was used once


TRUTHS = st.lists(
    st.builds(EngineTruth, st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 9999), st.floats(0, 100)), min_size=1
)


@given(TRUTHS, st.data())
def test_regret_is_never_negative_and_is_the_sum_of_its_parts(truths: list[EngineTruth], data: st.DataObject) -> None:
    regret = regret_of(0, data.draw(st.integers(0, len(truths) - 1)), truths)
    assert regret.regret_ms >= 0.0
    assert abs(regret.regret_ms - (regret.wait_ms + regret.prefill_ms + regret.adapter_ms)) < 1e-6
    assert (regret.reason == "none") == (regret.oracle_place == regret.place)
    assert regret.forgone_tokens >= 0
