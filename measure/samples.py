"""Durations of a run in bounded memory: exact while few, in buckets of 0.2 % once there are many."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import rshift

from measure.quantiles import quantile, quantile_bucket

EXACT_VALUES = 1 << 17
"""Most values kept exactly (1 MB); beyond, a quantile is within 0.1 % of the exact one."""

MANTISSA_BITS = 9
"""Bits of the mantissa that name a bucket: 512 buckets from a power of two to the next."""

SHIFT = 52 - MANTISSA_BITS


@dataclass(slots=True)
class Sample:
    """Values of a quantity in ms, 0 or more; samples of several processes add up. Pickles small."""

    values: "array[float]" = field(default_factory=lambda: array("d"))
    buckets: Counter[int] | None = None
    """Counts by bucket, named by the float's upper bits; null: no bucket is used."""
    folded: int = 0
    folded_total: float = 0.0
    folded_max: float = 0.0

    def add(self, value: float) -> None:
        """Add a value; below 0 it counts as 0."""
        self.values.append(value if value > 0.0 else 0.0)
        if len(self.values) > EXACT_VALUES:
            self.fold()

    def extend(self, values: Iterable[float]) -> None:
        self.values.extend(values)
        if len(self.values) > EXACT_VALUES:
            self.fold()

    def merge(self, other: "Sample") -> None:
        if other.buckets is not None:
            self.fold()
            assert self.buckets is not None
            self.buckets.update(other.buckets)
            self.folded += other.folded
            self.folded_total += other.folded_total
            self.folded_max = max(self.folded_max, other.folded_max)
        self.extend(other.values)

    def take_out(self, other: "Sample") -> None:
        """Undo a ``merge`` of a folded sample; ``max`` stays."""
        assert self.buckets is not None
        for bucket, count in (other.buckets or {}).items():
            self.buckets[bucket] -= count
            if not self.buckets[bucket]:
                del self.buckets[bucket]
        self.folded -= other.folded
        self.folded_total -= other.folded_total

    def fold(self) -> None:
        if self.buckets is None:
            self.buckets = Counter()
        self.buckets.update(map(rshift, memoryview(self.values).cast("B").cast("Q"), repeat(SHIFT)))
        self.folded, self.folded_total, self.folded_max = self.count, self.total, self.max
        del self.values[:]

    @property
    def count(self) -> int:
        return self.folded + len(self.values)

    @property
    def total(self) -> float:
        return self.folded_total + sum(self.values)

    @property
    def max(self) -> float:
        return max(self.folded_max, max(self.values, default=0.0))

    def quantile(self, share: float) -> float:
        """Return one quantile; IndexError if there is no value."""
        return self.quantiles(share)[0]

    def quantiles(self, *shares: float) -> list[float]:
        if self.buckets is None:
            values = sorted(self.values)
            return [quantile(values, share) for share in shares]
        self.fold()
        keys = sorted(self.buckets)
        upto = list(accumulate(map(self.buckets.__getitem__, keys)))
        largest = self.max
        return [min(_middle(keys[quantile_bucket(upto, share)]), largest) for share in shares]

    def check_integrity(self) -> None:
        assert self.folded == (self.buckets or Counter()).total()
        assert len(self.values) <= EXACT_VALUES
        assert all(value >= 0.0 for value in self.values)


def _middle(bucket: int) -> float:
    """Return the middle of a bucket; 0 for that of 0."""
    if bucket == 0:
        return 0.0
    return memoryview(array("Q", [(bucket << SHIFT) + (1 << (SHIFT - 1))])).cast("B").cast("d")[0]
