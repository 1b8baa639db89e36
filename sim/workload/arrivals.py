"""Requests on their way to an engine in columns: arrays of what it needs to know, and who can say the rest of each."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sim.workload.chainkeys import known_keys, numbered
from sim.workload.interning import chain_places
from sim.workload.workload import Arrival
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.batches import Batch, RecordBatch
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests in the order in which they are handed over; each column has an entry for every one."""

    ids: list[str]
    numbers: IntArray
    """Places in the whole workload, ascending."""
    arrival_ms: FloatArray
    """As recorded; that of one that waits for another's end is overruled by it."""
    prompt_tokens: IntArray
    output_tokens: IntArray
    """Tokens it would generate if nobody aborted it."""
    runs: npt.NDArray[np.bool_]
    """False: it failed before the engine saw it, and is copied."""
    priority: IntArray
    abort_after_ms: FloatArray
    """The client aborts it so long after its arrival. NaN: never."""
    recorded_e2e_ms: FloatArray
    parents: IntArray
    """Number of the request whose end it waits for; NOBODY: none, or that one has ended."""
    last_children: IntArray
    """Number of the last of those that wait for its end; NOBODY: nobody does."""
    think_ms: FloatArray
    """From its parent's end to its arrival; NaN: it never had one."""
    full_blocks: IntArray
    """Blocks that get full, at least."""
    known: IntArray
    """How many of these have a hash that others may have too."""
    hashes: npt.NDArray[np.uint64]
    """These, request after request; the only column without an entry for each."""
    sources: tuple[Batch, ...]
    source: IntArray
    """Which of ``sources`` has its record."""
    rows: IntArray
    """Which of that source's."""

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> Self:
        """A whole workload."""
        chains: Sequence[Sequence[int]] = [one.hashes for one in arrivals]
        try:
            hashes, known = known_keys(chains)
        except OverflowError:  # of a tool that counts below zero, or beyond 64 bits
            hashes, known = known_keys(numbered(chains))
        places = np.arange(len(arrivals))
        return cls(
            ids=[one.record.request_id for one in arrivals],
            numbers=places,
            arrival_ms=_floats([one.arrival_ms for one in arrivals]),
            prompt_tokens=np.array([one.prompt_tokens for one in arrivals], np.int64),
            output_tokens=np.array([one.output_tokens for one in arrivals], np.int64),
            runs=np.array([one.fate == "runs" for one in arrivals], bool),
            priority=np.array([one.record.priority or 0 for one in arrivals], np.int64),
            abort_after_ms=_floats([one.abort_after_ms for one in arrivals]),
            recorded_e2e_ms=_floats([one.record.e2e_ms for one in arrivals]),
            parents=np.array([NOBODY if one.parent is None else one.parent for one in arrivals], np.int64),
            last_children=_last_children([one.parent for one in arrivals]),
            think_ms=_floats([None if one.parent is None else one.think_ms for one in arrivals]),
            full_blocks=np.array([len(one.hashes) for one in arrivals], np.int64),
            known=known,
            hashes=hashes,
            sources=(RecordBatch([one.record for one in arrivals]),),
            source=np.zeros(len(arrivals), np.int64),
            rows=places,
        )

    def take(self, places: IntArray) -> Self:
        """Those at ``places``, in that order; sources that nobody needs any more are let go."""
        starts = np.cumsum(self.known) - self.known
        needed = np.unique(self.source[places])
        columns: dict[str, Any] = {name: getattr(self, name)[places] for name in _COLUMNS}
        columns |= {
            "ids": list(map(self.ids.__getitem__, places.tolist())),
            "hashes": self.hashes[chain_places(starts[places], self.known[places])],
            "sources": tuple(self.sources[number] for number in needed.tolist()),
            "source": np.searchsorted(needed, self.source[places]),
        }
        return replace(self, **columns)

    def followed_by(self, *others: Self) -> Self:
        """These and then ``others``."""
        every = (self, *others)
        moved = np.cumsum([0, *(len(one.sources) for one in every)])
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(one, name) for one in every]) for name in (*_COLUMNS, "hashes")
        }
        columns |= {
            "ids": [name for one in every for name in one.ids],
            "sources": tuple(source for one in every for source in one.sources),
            "source": np.concatenate([one.source + by for one, by in zip(every, moved[:-1], strict=True)]),
        }
        return replace(self, **columns)

    def records(self, places: IntArray) -> list[Record]:
        """Those at ``places``, which the caller may change and asks for once."""
        found: list[Record] = [None] * len(places)  # type: ignore[list-item]
        sources, rows = self.source[places], self.rows[places]
        for number in np.unique(sources).tolist():
            mine = np.flatnonzero(sources == number)
            for place, record in zip(mine.tolist(), self.sources[number].records(rows[mine]), strict=True):
                found[place] = record
        return found


_COLUMNS = [one.name for one in fields(Arrivals) if one.name not in ("ids", "hashes", "sources")]


def _last_children(parents: Sequence[int | None]) -> IntArray:
    last = np.full(len(parents), NOBODY)
    for number, parent in enumerate(parents):
        if parent is not None:
            last[parent] = number
    return last


def _floats(values: Sequence[float | None]) -> FloatArray:
    return np.array(values, np.float64)


def require_times(path: Path, ids: Sequence[str | None], arrival_ms: FloatArray) -> None:
    """Raise InputError naming the first request without an arrival."""
    for place in np.flatnonzero(np.isnan(arrival_ms))[:1].tolist():
        raise InputError(f"{path}: request {ids[place]}: arrival_ms: missing; expected a time")
