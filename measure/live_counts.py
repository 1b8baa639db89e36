"""Live counts of a run, and latency samples since the last refresh, for a live view. The trace has the records.

Each sending process has its counts; the parent process merges them.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import accumulate, repeat
from operator import rshift

from measure.quantiles import quantile, quantile_bucket
from tracefile.records.schema import Record

EXACT_VALUES = 1 << 17
"""Most values stored exactly (1 MB); beyond, a quantile is within 0.1 % of the exact value."""

MANTISSA_BITS = 9
"""Mantissa bits of a bucket: 512 buckets per power of two."""

SHIFT = 52 - MANTISSA_BITS


@dataclass(slots=True)
class Sample:
    """Latency values in ms, 0 or more; samples of several processes merge. Small when pickled."""

    values: "array[float]" = field(default_factory=lambda: array("d"))
    buckets: Counter[int] | None = None
    """Counts by bucket, the upper bits of the float; null: all values are exact."""
    folded: int = 0
    folded_total: float = 0.0
    folded_max: float = 0.0

    def add(self, value: float) -> None:
        """Add a latency value; negative values count as 0."""
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

    def subtract(self, other: "Sample") -> None:
        """Undo a ``merge`` of a folded sample, except for ``max``."""
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
        """Return a latency quantile, in ms; IndexError for an empty sample."""
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
    """Return the middle of a bucket, in ms; 0 for bucket 0."""
    if bucket == 0:
        return 0.0
    return memoryview(array("Q", [(bucket << SHIFT) + (1 << (SHIFT - 1))])).cast("B").cast("d")[0]


REFUSED = frozenset({400, 401, 403, 404, 405, 413, 415, 422, 501})
"""HTTP statuses of requests that the engine never accepts."""
REFUSALS_TO_STOP = 3


@dataclass(slots=True)
class Counts:
    """Counts of requests and tokens; counts of several processes add up."""

    started: int = 0
    in_flight: int = 0
    held: int = 0
    """Requests queued by ``--parallel``; their queue time is no lag of the client."""
    refused: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    looked_up_tokens: int = 0
    """Prompt tokens of requests with reported cached tokens."""
    cached_tokens: int = 0
    cached_reported: int = 0
    without_output_hashes: int = 0
    """Requests with status ok and without output token ids."""

    @property
    def ended(self) -> int:
        return self.statuses.total()

    @property
    def failed(self) -> int:
        return self.ended - self.statuses["ok"]

    @property
    def only_refusals(self) -> bool:
        """True if all ended requests were refused: at least ``REFUSALS_TO_STOP``, and as many as are in flight."""
        return self.refused == self.ended >= max(REFUSALS_TO_STOP, self.in_flight)

    def counts(self) -> "Counts":
        copy = Counts()
        copy.add_counts(self)
        return copy

    def add_counts(self, other: "Counts") -> None:
        for counter in fields(Counts):
            mine, theirs = getattr(self, counter.name), getattr(other, counter.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, counter.name, mine + theirs)


@dataclass(slots=True)
class Recent:
    """Latency samples since the last ``pop_recent``: TTFT, ITL, client lag, in ms."""

    ttft_ms: Sample = field(default_factory=Sample)
    itl_ms: Sample = field(default_factory=Sample)
    lag_ms: Sample = field(default_factory=Sample)

    def merge(self, other: "Recent") -> None:
        for mine, theirs in zip(self.samples, other.samples, strict=True):
            mine.merge(theirs)

    def subtract(self, other: "Recent") -> None:
        for mine, theirs in zip(self.samples, other.samples, strict=True):
            mine.subtract(theirs)

    def fold(self) -> None:
        for sample in self.samples:
            sample.fold()

    @property
    def samples(self) -> tuple[Sample, Sample, Sample]:
        return self.ttft_ms, self.itl_ms, self.lag_ms


@dataclass(slots=True)
class LiveCounts(Counts):
    """Live counts and latency samples of a run, without its records."""

    recent: Recent = field(default_factory=Recent)

    def start(self) -> None:
        self.started += 1
        self.in_flight += 1

    def finish(self, record: Record, *, is_sampled: bool = False) -> None:
        """Count an ended request. ``is_sampled``: ``recent`` already has its TTFT and ITL."""
        recent = self.recent
        if is_sampled:
            self.recent = Recent(lag_ms=recent.lag_ms)
        self.statuses[record.status] += 1
        if record.error is not None:
            self.errors[record.error] += 1
        self.refused += record.http_status in REFUSED
        self._add_lag(record)
        if not is_sampled:
            self._add_recent(record)
        self._add_tokens(record)
        self.recent = recent

    def pop_recent(self) -> Recent:
        """Return the latency samples since the last call, folded into buckets."""
        recent, self.recent = self.recent, Recent()
        recent.fold()
        return recent

    def merge(self, other: "LiveCounts") -> None:
        self.add_counts(other)
        self.recent.merge(other.recent)

    def check_integrity(self) -> None:
        assert 0 <= self.in_flight <= self.started - self.ended
        assert self.cached_tokens <= self.looked_up_tokens <= self.prompt_tokens
        for sample in self.recent.samples:
            sample.check_integrity()

    def _add_lag(self, record: Record) -> None:
        if record.arrival_ms is None or record.scheduled_ms is None:
            return
        if record.held:
            self.held += 1
        else:
            self.recent.lag_ms.add(abs(record.arrival_ms - record.scheduled_ms))

    def _add_recent(self, record: Record) -> None:
        if record.ttft_ms is not None:
            self.recent.ttft_ms.add(record.ttft_ms)
        self.recent.itl_ms.extend(gaps_per_token(record))

    def _add_tokens(self, record: Record) -> None:
        self.prompt_tokens += record.prompt_tokens or 0
        self.output_tokens += record.output_tokens or 0
        if record.status == "ok":
            self.without_output_hashes += record.output_block_hashes is None
        if record.cached_tokens is not None and record.prompt_tokens is not None:
            self.cached_reported += 1
            self.cached_tokens += record.cached_tokens
            self.looked_up_tokens += record.prompt_tokens


def gaps_per_token(record: Record) -> Iterable[float]:
    """Return inter-token latencies (ITL) in ms: each gap divided by the tokens of its read."""
    if record.itl_tokens.count(1) == len(record.itl_tokens):
        return record.itl_ms
    return (gap / tokens for gap, tokens in zip(record.itl_ms, record.itl_tokens, strict=True) if tokens)


LATE_MS = 5.0
LATE_SHARE_OF_TTFT = 0.01
"""Client lag |arrival − schedule| from which on latencies are unreliable, without requests queued by a limit."""


def late_limit_ms(ttft_p50_ms: float | None) -> float:
    """Return the largest lag, in ms, of a request that is not late; ``ttft_p50_ms`` null: no first token."""
    return max(LATE_MS, LATE_SHARE_OF_TTFT * (ttft_p50_ms or 0.0))
