"""A trace's records in the order in which they came, though files have them in the order in which they ended.

A small trace is sorted. A large one is read twice: first only for the times, which say how long each record must be
held back until nothing earlier can follow; then memory follows the requests in flight.
"""

import heapq
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from tracefile.errors import InputError
from tracefile.reading import TraceReader, open_trace
from tracefile.schema import Record

PART = 1 << 15
"""Requests that are handed over at once."""


def records_in_parts(reader: TraceReader, path: Path) -> Iterator[list[Record]]:
    """Records by ``arrival_ms``, those of one time as the file has them, ``PART`` at a time.

    Raises InputError naming a record without a time.
    """
    first = list(islice(reader, PART))
    if len(first) < PART:
        first.sort(key=lambda record: _arrival_ms(record, path))
        yield first
        return
    yield from _large(_chain(first, reader), path)


def _chain(first: list[Record], rest: TraceReader) -> Iterator[Record]:
    while first:
        some, first = first, []
        yield from some
    yield from rest


def _large(records: Iterator[Record], path: Path) -> Iterator[list[Record]]:
    earliest_ms = _earliest_to_come(path)
    waiting: list[tuple[float, int, Record]] = []
    part: list[Record] = []
    for place, record in enumerate(records):
        heapq.heappush(waiting, (_arrival_ms(record, path), place, record))
        while waiting and waiting[0][0] <= earliest_ms[place + 1]:
            part.append(heapq.heappop(waiting)[2])
        if len(part) >= PART:
            yield part
            part = []
    if part:
        yield part


def _earliest_to_come(path: Path) -> list[float]:
    """By place in the file: the earliest arrival from there on; infinity after the last."""
    with open_trace(path) as reader:
        times_ms = np.frombuffer(array("d", (_arrival_ms(record, path) for record in reader)))
    earliest: list[float] = np.minimum.accumulate(times_ms[::-1])[::-1].tolist()
    return [*earliest, float("inf")]


def _arrival_ms(record: Record, path: Path) -> float:
    if record.arrival_ms is None:
        raise InputError(f"{path}: request {record.request_id}: arrival_ms: missing; expected a time")
    return record.arrival_ms
