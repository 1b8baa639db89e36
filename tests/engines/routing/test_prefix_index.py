"""Prefix index of the router against a slow oracle."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engines.routing.prefix import PrefixIndex


class SlowIndex:
    """Time of each key's last use on each engine; the last used ones within the capacity are held."""

    def __init__(self, engines: int, capacity: int, lag_s: float) -> None:
        self.engines, self.capacity, self.lag_s = engines, capacity, lag_s
        self.sendings: list[tuple[float, int, Sequence[int]]] = []

    def cached_keys(self, engine: int, now_s: float) -> set[int]:
        order: list[int] = []
        for at_s, where, blocks in self.sendings:
            if where == engine and at_s + self.lag_s <= now_s:
                for key in reversed(blocks):
                    order = [*(second for second in order if second != key), key]
        return set(order[-self.capacity :])

    def overlaps(self, blocks: Sequence[int], now_s: float) -> list[int]:
        actual = []
        for engine in range(self.engines):
            cached_keys, count = self.cached_keys(engine, now_s), 0
            while count < len(blocks) and blocks[count] in cached_keys:
                count += 1
            actual.append(count)
        return actual


def chain(branches: Sequence[int]) -> list[int]:
    """Keys of a path: each depends on all before it, as chained hashes do."""
    keys, key = [], 0
    for branch in branches:
        key = key * 3 + branch + 1
        keys.append(key)
    return keys


CHAINS = st.lists(st.integers(0, 1), max_size=9).map(chain)


@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.lists(st.tuples(st.integers(0, 3), CHAINS, CHAINS, st.integers(0, 9)), max_size=25),
)
def test_index_equals_the_oracle(
    engines: int, capacity: int, lag_s: float, steps: list[tuple[int, list[int], list[int], int]]
) -> None:
    index, slow = PrefixIndex(engines, capacity_blocks=capacity, lag_s=lag_s), SlowIndex(engines, capacity, lag_s)
    for now, (used, sent, requested, forgotten) in enumerate(steps):
        engine = used % engines
        index.sent(engine, sent, float(now))
        slow.sendings.append((float(now), engine, sent))
        assert index.overlaps(requested, float(now)) == slow.overlaps(requested, float(now))
        if forgotten == 0:
            index.forget(engine)
            slow.sendings = [sending for sending in slow.sendings if sending[1] != engine]
