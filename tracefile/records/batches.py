"""Records some at a time with their fields as arrays, for passes over very many of them.

What is needed of every record is an array.
"""

import gc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.decoding import RecordColumns
from tracefile.records.schema import Record

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


class Batch:
    """Some records of a trace, in its order."""

    def __init__(self, records: list[Record] | RecordColumns) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def column(self, name: str) -> Sequence[Any]:
        """Return a field of every record."""
        records = self.records
        return list(map(attrgetter(name), records)) if isinstance(records, list) else records.column(name)

    def numbers(self, name: str, missing: int = 0) -> IntArray:
        """Return an integer field of every record; ``missing`` stands for null."""
        column = self.column(name)
        if column.count(None) == len(column):
            return np.full(len(column), missing)
        return np.array([missing if value is None else value for value in column], np.int64)

    def times(self, name: str) -> FloatArray:
        """Return a float field; NaN stands for null."""
        column = self.column(name)
        return np.full(len(column), np.nan) if column.count(None) == len(column) else np.array(column, np.float64)

    def equal(self, name: str, word: str) -> BoolArray:
        """Return for each record if a field is ``word``."""
        column = self.column(name)
        if column.count(word) == len(column):
            return np.ones(len(column), bool)
        return np.array([value == word for value in column], bool)

    def count(self, name: str) -> int:
        """Return how many records have a field."""
        return len(self) - self.column(name).count(None)

    def lengths(self, name: str) -> IntArray:
        """Return the lengths of a list field."""
        return np.array(list(map(len, self.column(name))), np.int64)

    def values(self, name: str) -> FloatArray:
        """Return the values of a list of numbers, one record's after another's."""
        lists = self.column(name)
        if all(values.count(1) == len(values) for values in lists):  # one token a read, as nearly always
            return np.ones(sum(map(len, lists)))
        return np.fromiter(chain.from_iterable(lists), np.float64)

    def hashes(self) -> Hashes:
        """Return the chains of all records."""
        return _joined_chains(self.column("block_hashes"), self.column("output_block_hashes"))

    def record(self, row: int) -> Record:
        """Return the record of a row, for the caller to change."""
        return copy(self.records[row]) if isinstance(self.records, list) else self.records.record(row)


def _joined_chains(prompts: Sequence[Sequence[int] | None], outputs: Sequence[Sequence[int] | None]) -> Hashes:
    every = list(chain.from_iterable(filter(None, chain.from_iterable(zip(prompts, outputs, strict=True)))))
    try:
        values = array("Q", every)
    except OverflowError:  # of a tool that counts below zero, or beyond 64 bits
        values = array("Q", [number % 2**64 for number in every])
    counts = [
        np.array([NO_LIST if hashes is None else len(hashes) for hashes in some], np.int64)
        for some in (prompts, outputs)
    ]
    ends = np.cumsum(np.maximum(counts[0], 0) + np.maximum(counts[1], 0))
    return Hashes(np.asarray(values), np.append(0, ends)[:-1], *counts)
