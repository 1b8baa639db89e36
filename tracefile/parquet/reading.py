"""Reading a trace in columns, row group by row group, as the records that were written."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise, repeat
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tracefile.parquet.arrowschema import CHAIN_COLUMNS, allowed_words, arrow_schema, field_types
from tracefile.parquet.layout import FOOTER_KEY, REST, Footer
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.batches import NO_LIST, Batch, Hashes, RecordBatch
from tracefile.records.decoding import NOT_JSON, convert_record, decode_meta, record_bounds
from tracefile.records.encoding import known_fields, merge_unknown
from tracefile.records.errors import InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import BlockHash, Meta, Record
from tracefile.storage.remote import is_url, open_file

NEVER_NULL = ("itl_ms", "itl_tokens", "new_hashes")
"""Lists that every row has."""


class ColumnsReader(TraceReader):
    """A trace in columns, read as any other; its lines are rows, from 1. Memory follows a row group."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), "kvtape")
        self._file = _open(self.path)
        self.footer = _footer(self._file, self.path)
        where = f"{self.path}: meta"
        self._metas = [(row, decode_meta(meta, where)) for row, meta in self.footer.metas]
        self._row = 0
        self._over = False
        """True once the last record was read: a header may stand behind it."""

    @property
    def meta(self) -> Meta:
        return self._metas[0][1]

    @property
    def latest_meta(self) -> Meta:
        return next(meta for row, meta in reversed(self._metas) if self._over or row == 0 or row < self._row)

    @property
    def line(self) -> int:
        return self._row

    def where(self, line: int | None = None) -> str:
        return f"{self.path}: row {self._row if line is None else line}"

    @property
    def warnings(self) -> list[str]:
        return super().warnings  # a file in columns is whole or unreadable

    def close(self) -> None:
        self._file.close()

    def column(self, name: str) -> Iterator[pa.Array]:
        for group in range(self._file.num_row_groups):
            yield self._file.read_row_group(group, columns=[name]).column(0).combine_chunks()

    def results(self) -> Iterator[Record | InputError]:
        for group in range(self._file.num_row_groups):
            for result in self._batch(group).results():
                self._row += 1
                yield result
        self._over = True

    def batches(self) -> Iterator[Batch]:
        """Iterate over row groups: as columns, or as records where a row has values without a column."""
        for group in range(self._file.num_row_groups):
            batch = self._batch(group)
            if batch.is_plain:
                self._row += len(batch)
                yield batch
                continue
            records = []
            for result in batch.results():
                self._row += 1
                records.append(self._without_faults(result) if isinstance(result, InputError) else result)
            yield RecordBatch(records)
        self._over = True

    def _batch(self, group: int) -> "ColumnBatch":
        described = self._file.metadata.row_group(group)
        try:
            table = self._file.read_row_group(group, use_threads=False, columns=_columns_with_values(described))
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise InputError(f"{self.path}: row {self._row + 1}: damaged ({error}); expected a whole file") from None
        columns = {name: _without_nan(table.column(name).combine_chunks()) for name in table.column_names}
        return ColumnBatch(columns, described.num_rows, self.path, self._row)


def _without_nan(column: pa.Array) -> pa.Array:
    """The column with nulls in place of NaN, as lines have it."""
    if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
        return pc.if_else(pc.is_nan(column), None, column)
    return column


def _columns_with_values(group: Any) -> list[str]:
    """Names of the columns that are not all null, or all empty lists, as far as the row group's statistics say."""
    return list(
        dict.fromkeys(
            column.path_in_schema.partition(".")[0]
            for column in map(group.column, range(group.num_columns))
            if not _is_empty(column)
        )
    )


def _is_empty(column: Any) -> bool:
    name, nested, _ = column.path_in_schema.partition(".")
    if nested and name not in NEVER_NULL:  # there, an empty one is not a null
        return False
    said = column.statistics
    return said is not None and bool(said.has_null_count) and bool(said.null_count == column.num_values)


def footer_of(path: str | os.PathLike[str]) -> Footer:
    """Return the file's own description; raises InputError if it is no kvtape trace."""
    with _open(os.fspath(path)) as file:
        return _footer(file, os.fspath(path))


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(open_file(path) if is_url(path) else path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a trace file") from error
    except (UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path}: damaged or cut short ({error}); expected a whole Parquet file") from None


def _footer(file: pq.ParquetFile, path: str) -> Footer:
    said = (file.metadata.metadata or {}).get(FOOTER_KEY)
    if said is None:
        raise InputError(f"{path}: Parquet, but not of a trace; expected one that tracefile wrote")
    try:
        footer = msgspec.json.decode(said, type=Footer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {FOOTER_KEY.decode()}: {error}; expected a trace's description") from None
    if not footer.metas or footer.records != file.metadata.num_rows:
        raise InputError(
            f"{path}: {file.metadata.num_rows} rows; expected the {footer.records} that tracefile wrote, "
            "as no other tool keeps their chains of hashes whole"
        )
    there = file.schema_arrow
    for name in arrow_schema().names:
        if name in there.names and there.field(name).type != arrow_schema().field(name).type:
            raise InputError(f"{path}: {name}: {there.field(name).type}; expected {arrow_schema().field(name).type}")
    return footer


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
        return "request_id" in checked and not faults_of(checked, self._count) and not out_of_bounds_in(self._columns)

    def results(self) -> Iterator[Record | InputError]:
        return group_records(self._columns, self.hashes(), self._path, self._first_row)

    def numbers(self, name: str, missing: int = 0) -> IntArray:
        column = self._columns.get(name)
        if column is None:
            return np.full(self._count, missing, np.int64)
        column = column.cast(pa.int64()) if pa.types.is_boolean(column.type) else column
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

    def values(self, name: str) -> FloatArray:
        column = self._columns.get(name)
        if column is None:
            return np.empty(0)
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return np.asarray(column.values.to_numpy(zero_copy_only=False)[first:last], np.float64)

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
        picked = Hashes(hashes.values, *(part[rows] for part in hashes[1:]))
        for record in group_records(taken, picked, self._path, 0):
            assert isinstance(record, Record)  # as the batch is plain
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
        wrong |= (blocks < 0) | (counts[np.where(wrong | (blocks <= 0), 0, rows)] < blocks)
        own = np.maximum(self.numbers("prompt_blocks"), 0) + np.maximum(self.numbers("output_blocks"), 0)
        for row in np.flatnonzero(own > counts)[:1].tolist():
            raise InputError(
                f"{self._path}: row {self._first_row + row + 1}: prompt_blocks: {own[row]} hashes with the output's; "
                f"expected at most the {counts[row]} of its chain"
            )
        for row in np.flatnonzero(wrong)[:1].tolist():
            raise InputError(
                f"{self._path}: row {self._first_row + row + 1}: prefix_row: {rows[row]} for {blocks[row]} blocks; "
                "expected an earlier row that has them"
            )


Values = Sequence[Any]
HashList = list[BlockHash] | None


def group_records(
    columns: dict[str, pa.Array], hashes: Hashes, path: str, first_row: int
) -> Iterator[Record | InputError]:
    """The records of one row group with these hashes; a column that is not there has nothing to say."""
    count = len(hashes.starts)
    known = {
        name: values
        for name in field_types()
        if name in columns and (values := _field_values(columns[name])) is not None
    }
    if set(known.get("status", ())) == {"ok"}:
        del known["status"]  # the default
    faults = faults_of(known, count)
    rows = zip(*known.values(), strict=True)
    rest: Iterable[dict[str, Any] | None] = rest_of(columns, path, first_row) or repeat(None, count)
    own, new_record = known_fields(Record), _constructor(tuple(known))
    bounded = out_of_bounds_in(columns)
    whole = zip(rows, _hash_lists(hashes), rest, strict=True)
    for number, (values, (prompt, output), other) in enumerate(whole, first_row + 1):
        if number - first_row - 1 in faults:
            yield InputError(f"{path}: row {number}: {faults[number - first_row - 1]}")
            continue
        record = new_record(values, prompt, output)
        fits = other is None or own.isdisjoint(other)
        if other is not None and fits:
            record.extra = other
        if fits and not bounded:
            yield record
        else:
            yield _with_fields(record, {} if fits else other or {}, f"{path}: row {number}")


@cache
def _constructor(names: tuple[str, ...]) -> Callable[[Values, HashList, HashList], Record]:
    """A record of these fields' values, in order, and its hashes: keywords cost a third of what a dict of them does."""
    given = ", ".join(f"{name}=values[{place}]" for place, name in enumerate(names))
    code = f"lambda values, prompt, output: Record({given}, block_hashes=prompt, output_block_hashes=output)"
    made: Callable[[Values, HashList, HashList], Record] = eval(code, {"Record": Record})
    return made


def _with_fields(record: Record, rest: dict[str, Any], where: str) -> Record | InputError:
    """The record with fields whose values their columns could not hold."""
    try:
        return convert_record(merge_unknown(record) | rest, where)
    except InputError as error:
        return error


def out_of_bounds_in(columns: dict[str, pa.Array]) -> list[str]:
    """Return the names of columns with values that a record may not have."""
    found = []
    for name, bounds in record_bounds().items():
        if name not in columns:
            continue
        values = columns[name]
        ends = pc.min_max(pc.list_flatten(values) if pa.types.is_list(values.type) else values).as_py()
        if ends["min"] is not None and not bounds.least <= ends["min"] <= ends["max"] <= bounds.most:
            found.append(name)
    return found


def rest_of(columns: dict[str, pa.Array], path: str, first_row: int) -> list[dict[str, Any] | None] | None:
    """Decode the fields without a column as one list; None if no row has any."""
    texts = _python_values(columns[REST]) if REST in columns else None
    if texts is None:
        return None
    try:
        whole = "[" + ",".join("null" if text is None else text for text in texts) + "]"
        found = msgspec.json.decode(whole, type=list[dict[str, Any] | None])
    except NOT_JSON as error:
        raise InputError(f"{path}: after row {first_row}: {REST}: {error}; expected JSON objects") from None
    if len(found) != len(texts):
        raise InputError(f"{path}: after row {first_row}: {REST}: {len(found)} objects; expected {len(texts)}")
    return found


def faults_of(known: dict[str, Values], count: int) -> dict[int, str]:
    """Return the faults of rows, by place."""
    ids = known.get("request_id", [None] * count)
    faults = {place: "request_id: missing; expected in every record" for place, name in enumerate(ids) if name is None}
    for name, words in allowed_words().items():
        optional = name != "status"
        if name not in known or set(known[name]) <= words | ({None} if optional else set()):
            continue
        for place, word in enumerate(known[name]):
            if word not in words and not (word is None and optional):
                faults[place] = f"{name}: {word!r}; expected {', '.join(sorted(words))}"
    return faults


def _hash_lists(hashes: Hashes) -> Iterator[tuple[HashList, HashList]]:
    """Yield each row's hashes of its prompt and of its output."""
    for start, prompt, output in zip(*(part.tolist() for part in hashes[1:]), strict=True):
        middle = start + max(prompt, 0)
        yield (
            None if prompt == NO_LIST else hashes.values[start:middle].tolist(),
            None if output == NO_LIST else hashes.values[middle : middle + output].tolist(),
        )


def _field_values(column: pa.Array) -> Values | None:
    """A column as Python's values; None where every row has the field's default."""
    if column.null_count == len(column):
        return None
    if pa.types.is_map(column.type):
        return [None if items is None else dict(items) for items in column.to_pylist()]
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        return list(column.to_pylist())
    if pa.types.is_list(column.type):
        return _lists(column) if len(column.values) else None
    return _python_values(column)


def _python_values(column: pa.Array) -> Values | None:
    """Return ``to_pylist`` by way of NumPy, several times faster; None if all are null."""
    if column.null_count == len(column):
        return None
    if pa.types.is_string(column.type):
        return texts_of(column)
    if column.null_count == 0:
        return list(column.to_numpy(zero_copy_only=False).tolist())
    found = column.fill_null(False if pa.types.is_boolean(column.type) else 0).to_numpy(zero_copy_only=False).tolist()
    valid = column.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [value if known else None for value, known in zip(found, valid, strict=True)]


def texts_of(column: pa.Array) -> Values:
    """A column of text as Python's strings."""
    coded = column.dictionary_encode()
    if 4 * len(coded.dictionary) > len(column):
        return list(column.to_pylist())
    # Interned, so that a word that is a field's default is that object, which is how defaults are told on writing.
    words = [sys.intern(word) for word in coded.dictionary.to_pylist()]
    places = _python_values(coded.indices) or ()
    return [None if place is None else words[place] for place in places]


def _lists(column: pa.Array) -> list[list[Any]]:
    """A column of lists of numbers; a null is an empty one."""
    flat = column.values.to_numpy(zero_copy_only=False).tolist()
    return [flat[start:end] for start, end in pairwise(column.offsets.to_numpy().tolist())]
