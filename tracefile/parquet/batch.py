"""A row group of a trace in columns as a batch: arrays as they are, records where they are asked for."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from tracefile.parquet.arrowschema import CHAIN_COLUMNS, allowed_words
from tracefile.parquet.layout import REST
from tracefile.parquet.rows import faults_of, group_records, rest_of, texts_of
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.batches import NO_LIST, Hashes
from tracefile.records.encoding import known_fields
from tracefile.records.errors import InputError
from tracefile.records.schema import Record


class ColumnBatch:
    """A row group's columns; one that is not there has nothing to say."""

    def __init__(self, columns: dict[str, pa.Array], count: int, path: str, first_row: int) -> None:
        self._columns = columns
        self._count = count
        self._path = path
        self._first_row = first_row
        self._hashes: Hashes | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def is_plain(self) -> bool:
        """Return whether every row is a record that its columns hold all of, but for unknown fields."""
        rest = rest_of(self._columns, self._path, self._first_row)
        if rest is not None and not all(other is None or known_fields(Record).isdisjoint(other) for other in rest):
            return False
        names = (name for name in (*allowed_words(), "request_id") if name in self._columns)
        checked = {name: texts_of(self._columns[name]) for name in names}
        return "request_id" in checked and not faults_of(checked, self._count)

    def results(self) -> Iterator[Record | InputError]:
        """Yield all records; a malformed row is given as its InputError."""
        return group_records(self._columns, self._count, self._path, self._first_row)

    def numbers(self, name: str, missing: int = 0) -> IntArray:
        column = self._columns.get(name)
        if column is None:
            return np.full(self._count, missing, np.int64)
        return np.asarray(column.fill_null(missing).to_numpy(zero_copy_only=False), np.int64)

    def times(self, name: str) -> FloatArray:
        column = self._columns.get(name)
        if column is None:
            return np.full(self._count, np.nan)
        return np.asarray(column.fill_null(np.nan).to_numpy(zero_copy_only=False), np.float64)

    def words(self, name: str) -> Sequence[str | None]:
        return texts_of(self._columns[name]) if name in self._columns else [None] * self._count

    def lengths(self, name: str) -> IntArray:
        column = self._columns.get(name)
        if column is None:
            return np.zeros(self._count, np.int64)
        return np.asarray(np.diff(column.offsets.to_numpy()), np.int64)

    def hashes(self) -> Hashes:
        if self._hashes is None:
            self._hashes = self._decoded_hashes()
            for name in CHAIN_COLUMNS:
                self._columns.pop(name, None)
        return self._hashes

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._columns.pop(REST if name == "extra" else name, None)

    def records(self, rows: IntArray | None = None) -> list[Record]:
        hashes = self.hashes()
        rows = np.arange(self._count) if rows is None else rows
        at = pa.array(rows)
        taken = {name: column.take(at) for name, column in self._columns.items()}
        found = []
        for record, row in zip(group_records(taken, len(rows), self._path, 0), rows.tolist(), strict=True):
            assert isinstance(record, Record)  # as the batch is plain
            start, prompt, output = (int(part[row]) for part in hashes[1:])
            middle, end = start + max(prompt, 0), start + max(prompt, 0) + max(output, 0)
            if prompt != NO_LIST:
                record.block_hashes = hashes.values[start:middle].tolist()
            if output != NO_LIST:
                record.output_block_hashes = hashes.values[middle:end].tolist()
            found.append(record)
        return found

    def _decoded_hashes(self) -> Hashes:
        prompts, outputs = self.numbers("prompt_blocks", NO_LIST), self.numbers("output_blocks", NO_LIST)
        prefix_rows, prefix_blocks = self.numbers("prefix_row"), self.numbers("prefix_blocks")
        new_counts = self.lengths("new_hashes")
        counts = prefix_blocks + new_counts
        self._check_prefixes(prefix_rows, prefix_blocks, counts)
        starts = np.cumsum(counts) - counts
        values = np.empty(int(counts.sum()), np.uint64)
        if "new_hashes" in self._columns:
            column = self._columns["new_hashes"]
            first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
            is_new = np.arange(len(values)) >= np.repeat(starts + prefix_blocks, counts)
            values[is_new] = column.values.to_numpy()[first:last]
        shares = np.flatnonzero(prefix_blocks)
        for start, count, other in zip(
            starts[shares].tolist(), prefix_blocks[shares].tolist(), starts[prefix_rows[shares]].tolist(), strict=True
        ):
            values[start : start + count] = values[other : other + count]
        return Hashes(values, starts, prompts, outputs)

    def _check_prefixes(self, rows: IntArray, blocks: IntArray, counts: IntArray) -> None:
        wrong = (blocks > 0) & ((rows < 0) | (rows >= np.arange(self._count)))
        wrong |= (blocks < 0) | (counts[np.where(wrong, 0, rows)] < blocks)
        for row in np.flatnonzero(wrong)[:1].tolist():
            raise InputError(
                f"{self._path}: row {self._first_row + row + 1}: prefix_row: {rows[row]} for {blocks[row]} blocks; "
                "expected an earlier row that has them"
            )
