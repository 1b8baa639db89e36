"""Things to come, the earliest first: a binary heap of EVENT records, ordered by time and then by code."""

from sim.kernels.compiling import kernel
from sim.kernels.layout import Records


@kernel
def push(heap: Records, size: int, time_ms: float, code: int) -> None:
    """Add an event to a heap of ``size``; the caller counts it."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if not _is_before(time_ms, code, heap[parent].time_ms, heap[parent].code):
            break
        heap[place].time_ms = heap[parent].time_ms
        heap[place].code = heap[parent].code
        place = parent
    heap[place].time_ms = time_ms
    heap[place].code = code


@kernel
def pop(heap: Records, size: int) -> None:
    """Take the first event, which the caller has read, out of a heap of ``size``; the caller counts it."""
    last = size - 1
    time_ms, code = heap[last].time_ms, heap[last].code
    place = 0
    while True:
        child = 2 * place + 1
        if child >= last:
            break
        other = child + 1
        if other < last and _is_before(heap[other].time_ms, heap[other].code, heap[child].time_ms, heap[child].code):
            child = other
        if not _is_before(heap[child].time_ms, heap[child].code, time_ms, code):
            break
        heap[place].time_ms = heap[child].time_ms
        heap[place].code = heap[child].code
        place = child
    heap[place].time_ms = time_ms
    heap[place].code = code


@kernel
def _is_before(time_ms: float, code: int, other_ms: float, other_code: int) -> bool:
    return time_ms < other_ms or (time_ms == other_ms and code < other_code)
