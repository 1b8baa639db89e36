"""Why a reported count of cached tokens is not what the rules say: causes that are tested, one by one.

What the trace cannot know comes first: content without hashes, or that was there before the capture. Then a pool of
another size: counts are then mostly off by as many blocks as the pool is, and agree in one of the right size. Then
orders that its clock cannot tell apart: the request, or one next to it in line, a step sooner or later. An order is
believed where it makes the request agree and no more requests differ than before; later differences that go with it
follow from it. The search reads what was reported, so it explains differences and never counts towards what is exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mode

from sim.fit.capturedschedule import Admitted, CapturedSchedule, Reconstruction, reconstruct
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrival
from sim.workload.chain import is_private

MOST_RUNS = 400
"""Of other orders, in all: then the rest stays unexplained."""
_NEIGHBOURS = 4
_SHIFTS = (1, -1, 2, -2)


@dataclass(frozen=True, slots=True)
class Difference:
    """One request whose two counts differ."""

    request_id: str
    reported: int
    predicted: int | None
    """None: the rules never admit it."""
    preemptions: int
    """In the reconstruction."""
    cause: str


def explain(arrivals: Sequence[Arrival], engine: EngineConfig, found: Reconstruction) -> list[Difference]:
    """Every difference of ``found`` from what was reported, with its cause, by when it was admitted."""
    causes: dict[int, str] = {}
    search = _OrderSearch(arrivals, engine, found)
    blocks, in_that_pool = _other_pool(arrivals, engine, found)
    for place in _differing(found):
        causes[place] = (
            _beyond_the_trace(place, found, engine.block_size)
            or (f"pool: agrees in one of {blocks} blocks" if place in in_that_pool else None)
            or search.cause(place)
            or _off_schedule(found.outcomes[place])
            or "unexplained"
        )
    return [_difference(found.outcomes[place], cause) for place, cause in causes.items()]


def _difference(outcome: Admitted, cause: str) -> Difference:
    record = outcome.arrival.record
    assert record.cached_tokens is not None
    return Difference(record.request_id, record.cached_tokens, outcome.cached_tokens, outcome.preemptions, cause)


def _differing(found: Reconstruction) -> list[int]:
    """Places of those that differ, by when they were admitted; those that never were come last."""
    places = [
        place
        for place, outcome in enumerate(found.outcomes)
        if outcome.arrival.record.cached_tokens not in {None, outcome.cached_tokens}
    ]
    return sorted(places, key=lambda place: _admitted_ms(found.outcomes[place]))


def _admitted_ms(outcome: Admitted) -> float:
    return float("inf") if outcome.admitted_ms is None else outcome.admitted_ms


def _beyond_the_trace(place: int, found: Reconstruction, block_size: int) -> str | None:
    """What no order can explain, because the trace does not hold it."""
    outcome = found.outcomes[place]
    reported = outcome.arrival.record.cached_tokens or 0
    if outcome.request is None:
        return "never served under these settings" if outcome.arrival.kind == "runs" else "ended before it was served"
    if reported % block_size:
        return f"reported is no multiple of {block_size}: another block size"
    blocks = reported // block_size
    if reported <= (outcome.cached_tokens or 0) or not blocks:
        return None
    hashes = outcome.arrival.hashes
    if blocks > len(hashes) or is_private(hashes[blocks - 1]):
        return "reported reaches beyond the hashes that the trace has of it"
    last = hashes[blocks - 1]
    if not any(last in other.arrival.hashes for at, other in enumerate(found.outcomes) if at != place):
        return "cached before the capture, or part of an answer whose ids are unknown"
    return None


def _other_pool(arrivals: Sequence[Arrival], engine: EngineConfig, found: Reconstruction) -> tuple[int, set[int]]:
    """The size of a pool in which at most half as many requests differ, and who agrees there; nobody: there is none."""
    differing = _differing(found)
    off = [
        ((outcome.cached_tokens or 0) - (outcome.arrival.record.cached_tokens or 0)) // engine.block_size
        for outcome in (found.outcomes[place] for place in differing)
        if outcome.request is not None
    ]
    blocks = engine.num_gpu_blocks - (mode(off) if off else 0)
    if blocks == engine.num_gpu_blocks or blocks <= 1:
        return blocks, set()
    still = _differing(reconstruct(arrivals, replace(engine, num_gpu_blocks=blocks)))
    return blocks, set(differing) - set(still) if 2 * len(still) <= len(differing) else set()


def _off_schedule(outcome: Admitted) -> str | None:
    if outcome.steps_off:
        return f"its first token was seen {outcome.steps_off:+d} steps off: its step is not recovered"
    return f"preempted {outcome.preemptions} times: its admission is not recovered" if outcome.preemptions else None


class _OrderSearch:
    """Orders within the clock's uncertainty: those found so far are kept, and later ones build on them."""

    def __init__(self, arrivals: Sequence[Arrival], engine: EngineConfig, found: Reconstruction) -> None:
        self._arrivals = arrivals
        self._engine = engine
        self._shifted = dict(found.shifted)
        self._differing = _differing(found)
        self._line = sorted(
            (place for place, outcome in enumerate(found.outcomes) if outcome.admitted_ms is not None),
            key=lambda place: (_admitted_ms(found.outcomes[place]), found.outcomes[place].arrival.arrival_ms),
        )
        self._runs = 0
        self._believed: list[str] = []
        self._found = found

    def cause(self, place: int) -> str | None:
        """The order in which the request at ``place`` agrees; None: no such order was found."""
        if place not in self._differing:
            return f"follows from {self._believed[-1]}"
        for name, shifted, by_reads in self._orders(place):
            if self._runs >= MOST_RUNS:
                return None
            self._runs += 1
            other = CapturedSchedule(self._arrivals, self._engine, shifted, by_reads=by_reads).run()
            differing = _differing(other)
            if place not in differing and len(differing) <= len(self._differing):
                if not by_reads:
                    self._shifted, self._differing = dict(shifted), differing
                    self._believed.append(self._id(place))
                return name
        return None

    def _orders(self, place: int) -> Iterator[tuple[str, Mapping[int, int], bool]]:
        """Those to try for ``place``, the nearest first, in words."""
        yield "order: agrees if first tokens of a step are in line as read", self._shifted, True
        around = self._line.index(place) if place in self._line else 0
        near = self._line[max(0, around - _NEIGHBOURS) : around + _NEIGHBOURS + 1]
        for other in sorted(near, key=lambda one: abs(self._line.index(one) - around)):
            for steps in _SHIFTS:
                who = "it" if other == place else self._id(other)
                way = f"{abs(steps)} step{'s' * (abs(steps) > 1)} {'later' if steps > 0 else 'sooner'}"
                shifted = {**self._shifted, other: self._shifted.get(other, 0) + steps}
                yield f"order: agrees if {who} is admitted {way}", shifted, False

    def _id(self, place: int) -> str:
        return self._arrivals[place].record.request_id[:12]
