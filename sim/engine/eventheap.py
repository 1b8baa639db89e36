"""Priority queue of request events, by time, then by code. mypyc compiles this module."""

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from sim.engine.simulatedrequest import PARENT_FAILED, UNSERVABLE, SimulatedRequest

NEVER_MS: Final = float("inf")


class EventHeap:
    """Binary heap of events: time, code, request."""

    def __init__(self) -> None:
        self.size: i64 = 0
        self.next_ms: float = NEVER_MS
        """Time of the next event; infinity: no event."""
        self.next_code: i64 = 0
        self._times_ms: vec[float] = vec[float]()
        self._codes: vec[i64] = vec[i64]()
        self._slots: vec[i64] = vec[i64]()
        """Index into ``_requests`` by heap position; free indices follow the events."""
        self._requests: list[SimulatedRequest] = []

    def push(self, time_ms: float, code: i64, request: SimulatedRequest) -> None:
        """Add an event; at equal times the smallest code comes first."""
        index = self.size
        self.size += 1
        if index == i64(len(self._requests)):
            self._times_ms = append(self._times_ms, time_ms)
            self._codes = append(self._codes, code)
            self._slots = append(self._slots, index)
            self._requests.append(request)
        slot = self._slots[index]
        self._requests[slot] = request
        while index > 0:
            parent = (index - 1) >> 1
            if not self._is_before(time_ms, code, parent):
                break
            self._move(parent, index)
            index = parent
        self._set(index, time_ms, code, slot)
        self._update_next()

    def pop(self) -> SimulatedRequest:
        """Pop the next event; return its request."""
        self.size -= 1
        last = self.size
        time_ms = self._times_ms[last]
        code = self._codes[last]
        slot = self._slots[last]
        popped = self._slots[last] = self._slots[0]
        index: i64 = 0
        while True:
            child = 2 * index + 1
            if child >= last:
                break
            other = child + 1
            if other < last and self._is_before(self._times_ms[other], self._codes[other], child):
                child = other
            if self._is_before(time_ms, code, child):
                break
            self._move(child, index)
            index = child
        if last > 0:
            self._set(index, time_ms, code, slot)
        self._update_next()
        return self._requests[popped]

    def _update_next(self) -> None:
        self.next_ms = self._times_ms[0] if self.size > 0 else NEVER_MS
        self.next_code = self._codes[0]

    def _is_before(self, time_ms: float, code: i64, index: i64) -> bool:
        return time_ms < self._times_ms[index] or (time_ms == self._times_ms[index] and code < self._codes[index])

    def _move(self, source: i64, target: i64) -> None:
        self._set(target, self._times_ms[source], self._codes[source], self._slots[source])

    def _set(self, index: i64, time_ms: float, code: i64, slot: i64) -> None:
        self._times_ms[index] = time_ms
        self._codes[index] = code
        self._slots[index] = slot


def push_first_turns(arrivals: EventHeap, requests: list[SimulatedRequest]) -> None:
    """Schedule the arrivals of requests without a parent."""
    for request in requests:
        if not request.has_parent:
            arrivals.push(request.arrival_ms, request.index, request)


def push_next_turns(arrivals: EventHeap, request: SimulatedRequest) -> None:
    """Schedule the next turns of a session, their think time after the request's end; after a failure they fail too."""
    ended = [request]
    while ended:
        parent = ended.pop()
        failed = parent.outcome in (UNSERVABLE, PARENT_FAILED)
        for child in parent.children:
            arrival_ms = parent.end_ms() + child.think_ms
            if failed:
                child.arrival_ms = arrival_ms
                child.outcome = PARENT_FAILED
                ended.append(child)
            else:
                arrivals.push(arrival_ms, child.index, child)
