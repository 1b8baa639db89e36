"""Records some at a time with their fields as arrays, whatever form the file has: for passes over very many of them.

What is needed of every record is an array; the record itself is made only when it is asked for. So a trace in columns
costs no objects for what is only counted, and one in lines costs those that it was decoded into.
"""

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.schema import Record

BATCH = 1 << 11
"""Records of a trace in lines that make a batch."""
NO_LIST = -1
"""Length of a list that a record does not have."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the collector of cycles away from millions of objects without any: it takes a quarter of such a pass."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Hashes(NamedTuple):
    """The chains of a batch, one after another: each request's prompt and, behind it, its answer."""

    values: npt.NDArray[np.uint64]
    """Numbers of other than 64 bits are their low ones."""
    starts: IntArray
    """Where each request's begins in ``values``."""
    prompt_blocks: IntArray
    """How many are ``block_hashes``; NO_LIST: the record has none."""
    output_blocks: IntArray
    """How many are ``output_block_hashes``, likewise."""


class Batch(Protocol):
    """Some records of a trace, in its order."""

    def __len__(self) -> int:
        """Return the number of records."""

    def numbers(self, name: str, missing: int = 0) -> IntArray:
        """An integer field of every record; ``missing`` stands for null."""

    def times(self, name: str) -> FloatArray:
        """A float field; NaN stands for null."""

    def words(self, name: str) -> Sequence[str | None]:
        """A field of text."""

    def lengths(self, name: str) -> IntArray:
        """Return the lengths of a list field."""

    def values(self, name: str) -> FloatArray:
        """Return the values of a list of numbers, one record's after another's."""

    def hashes(self) -> Hashes:
        """Return the chains of all records."""

    def forget(self, names: Iterable[str]) -> None:
        """Drop fields that are not needed again; records may keep them or not."""

    def records(self, rows: IntArray | None = None) -> list[Record]:
        """Return the records of ``rows`` (None: all); the caller may change them and calls once."""


class RecordBatch:
    """Records that are there anyway."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def numbers(self, name: str, missing: int = 0) -> IntArray:
        values = map(attrgetter(name), self._records)
        return np.array([missing if value is None else value for value in values], np.int64)

    def times(self, name: str) -> FloatArray:
        return np.array(list(map(attrgetter(name), self._records)), np.float64)

    def words(self, name: str) -> Sequence[str | None]:
        return list(map(attrgetter(name), self._records))

    def lengths(self, name: str) -> IntArray:
        return np.array([len(values) for values in map(attrgetter(name), self._records)], np.int64)

    def values(self, name: str) -> FloatArray:
        lists = list(map(attrgetter(name), self._records))
        if all(values.count(1) == len(values) for values in lists):  # one token a read, as nearly always
            return np.ones(sum(map(len, lists)))
        return np.fromiter(chain.from_iterable(lists), np.float64)

    def hashes(self) -> Hashes:
        prompts, outputs = (
            list(map(attrgetter(name), self._records)) for name in ("block_hashes", "output_block_hashes")
        )
        values = array("Q")
        for chains in zip(prompts, outputs, strict=True):
            for hashes in chains:
                if hashes:
                    _extend(values, hashes)
        counts = [np.array([NO_LIST if c is None else len(c) for c in some], np.int64) for some in (prompts, outputs)]
        ends = np.cumsum(np.maximum(counts[0], 0) + np.maximum(counts[1], 0))
        return Hashes(_as_array(values), np.append(0, ends)[:-1], *counts)

    def forget(self, names: Iterable[str]) -> None:
        if "itl_ms" in names and "itl_tokens" in names:  # what takes room
            for record in self._records:
                record.itl_ms, record.itl_tokens = [], []

    def records(self, rows: IntArray | None = None) -> list[Record]:
        return self._records if rows is None else [self._records[row] for row in rows.tolist()]


class LeanBatch:
    """Requests of a format with few fields: their columns, and records made only when they are asked for."""

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any]],
        hashes: Hashes,
        make_records: Callable[[Sequence[int]], list[Record]],
    ) -> None:
        """``columns``: values without nulls, by field; all other fields have the schema's default, lists are empty."""
        self._columns, self._hashes, self._make_records = columns, hashes, make_records
        self._count = len(hashes.starts)

    def __len__(self) -> int:
        return self._count

    def numbers(self, name: str, missing: int = 0) -> IntArray:
        found = self._columns.get(name)
        return np.full(self._count, missing) if found is None else np.array(found, np.int64)

    def times(self, name: str) -> FloatArray:
        found = self._columns.get(name)
        return np.full(self._count, np.nan) if found is None else np.array(found, np.float64)

    def words(self, name: str) -> Sequence[str | None]:
        found = self._columns.get(name)
        return [_DEFAULTS[name]] * self._count if found is None else found

    def lengths(self, name: str) -> IntArray:
        return np.zeros(self._count, np.int64)

    def values(self, name: str) -> FloatArray:
        return np.empty(0)

    def hashes(self) -> Hashes:
        return self._hashes

    def forget(self, names: Iterable[str]) -> None:
        pass

    def records(self, rows: IntArray | None = None) -> list[Record]:
        return self._make_records(range(self._count) if rows is None else rows.tolist())


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Record)}


def prompt_chains(chains: Iterable[Sequence[int]]) -> Hashes:
    """Return chains of prompts, one after another, as those of a batch without output hashes."""
    values, counts = array("Q"), []
    for hashes in chains:
        _extend(values, hashes)
        counts.append(len(hashes))
    blocks = np.array(counts, np.int64)
    return Hashes(_as_array(values), np.cumsum(blocks) - blocks, blocks, np.full(len(blocks), NO_LIST))


def _as_array(values: "array[int]") -> npt.NDArray[np.uint64]:
    return np.frombuffer(values, np.uint64) if values else np.empty(0, np.uint64)


def _extend(values: "array[int]", hashes: Sequence[int]) -> None:
    before = len(values)
    try:
        values.extend(hashes)
    except OverflowError:  # of a tool that counts below zero, or beyond 64 bits
        del values[before:]
        values.extend([number % 2**64 for number in hashes])
