"""Writing a trace in columns: row group by row group, under its name only once it is whole."""

import contextlib
import hashlib
import math
import os
from array import array
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tracefile.parquet.arrowschema import HASHES, arrow_schema, field_types
from tracefile.parquet.layout import FOOTER_KEY, Footer
from tracefile.records.encoding import encode_record, meta_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.storage.appending import begin_replacement

GROUP_ROWS = 1 << 14
GROUP_VALUES = 1 << 21
"""Hashes and gaps of a row group: what bounds a reader's memory where chains are long."""


class ColumnsWriter:
    """Writes records to a Parquet file; as ``TraceWriter`` does, but that a killed writer leaves no trace at all."""

    def __init__(self, path: str | os.PathLike[str], meta: Meta, *, overwrite: bool = False, mode: int = 0o666) -> None:
        self.path = os.fspath(path)
        self.count = 0
        self._new = begin_replacement(path, overwrite=overwrite, mode=mode)
        self._metas = [(0, meta)]
        self._digest = hashlib.sha256()
        self._records: list[Record] = []
        self._values = 0
        try:
            self._file = pq.ParquetWriter(
                self._new.aside,
                arrow_schema(),
                compression="zstd",
                compression_level=1,
                use_dictionary=[name for name, kind in field_types().items() if _repeats(name, kind)],
            )
        except OSError as error:
            self._new.abandon()
            raise self._no_room(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def write(self, record: Record) -> None:
        self._digest.update(encode_record(record))
        self._records.append(record)
        self.count += 1
        self._values += len(record.itl_ms) + sum(len(getattr(record, name) or ()) for name in HASHES)
        if len(self._records) >= GROUP_ROWS or self._values >= GROUP_VALUES:
            self._write_group()

    def change_meta(self, meta: Meta) -> None:
        if meta != self._metas[-1][1]:
            self._metas.append((self.count, meta))

    def close(self) -> None:
        """Write what is left and give the file its name."""
        if self._records:
            self._write_group()
        footer = Footer(
            records=self.count,
            digest=self._digest.hexdigest(),
            metas=[(row, meta_object(meta)) for row, meta in self._metas],
        )
        try:
            self._file.add_key_value_metadata({FOOTER_KEY: msgspec.json.encode(footer)})
            self._file.close()
            self._new.take_name()
        except OSError as error:
            self.abandon()
            raise self._no_room(error) from error

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._new.abandon()

    def _write_group(self) -> None:
        table = pa.Table.from_arrays(group_columns(self._records), schema=arrow_schema())
        try:
            self._file.write_table(table, row_group_size=len(self._records))
        except OSError as error:
            raise self._no_room(error) from error
        self._records, self._values = [], 0

    def _no_room(self, error: OSError) -> InputError:
        return InputError(f"{self.path}: cannot write ({error.strerror or error}); expected room")


def group_columns(records: list[Record]) -> list[pa.Array]:
    """The columns of one row group, in the schema's order."""
    rest: list[dict[str, Any]] = [dict(record.extra) for record in records]
    columns = [_column(name, kind, records, rest) for name, kind in field_types().items()]
    columns += _chain_columns(records, rest)
    columns.append(pa.array([msgspec.json.encode(some).decode() if some else None for some in rest], pa.string()))
    return columns


def _repeats(name: str, kind: pa.DataType) -> bool:
    return name != "request_id" and kind in (pa.string(), pa.bool_())


def _column(name: str, kind: pa.DataType, records: list[Record], rest: list[dict[str, Any]]) -> pa.Array:
    values = [getattr(record, name) for record in records]
    if kind == pa.float64():
        values = [value if value is None or math.isfinite(value) else None for value in values]
    if pa.types.is_map(kind):
        values = [None if value is None else list(value.items()) for value in values]
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid):  # numbers beyond 64 bits: kept as text
        for place, value in enumerate(values):
            if not _fits(value, kind):
                rest[place][name], values[place] = value, [] if pa.types.is_list(kind) else None
        return pa.array(values, kind)


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], kind)
    except (OverflowError, pa.ArrowInvalid):
        return False
    return True


def _chain_columns(records: list[Record], rest: list[dict[str, Any]]) -> list[pa.Array]:
    """In the order of ``CHAIN_COLUMNS``."""
    encoder, coded, lengths = ChainEncoder(), [], []
    for record, other in zip(records, rest, strict=True):
        prompt, output = record.block_hashes, record.output_block_hashes
        try:
            coded.append(encoder.encode([*(prompt or ()), *(output or ())]))
        except OverflowError:  # of a tool that counts below zero, or beyond 64 bits
            coded.append(encoder.encode([]))
            other |= {name: getattr(record, name) for name in HASHES if getattr(record, name) is not None}
            prompt = output = None
        lengths.append((None if prompt is None else len(prompt), None if output is None else len(output)))
    ends = np.cumsum([0, *(len(chain.new) for chain in coded)])
    new = array("Q")
    for chain in coded:
        new.extend(chain.new)
    return [
        pa.array([prompt for prompt, _ in lengths], pa.int32()),
        pa.array([output for _, output in lengths], pa.int32()),
        pa.array([chain.prefix_row for chain in coded], pa.int32()),
        pa.array([chain.prefix_blocks for chain in coded], pa.int32()),
        pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.array(new, np.uint64))),
    ]


Chain = list[int]


class CodedChain(NamedTuple):
    """Chain of one row."""

    prefix_row: int | None
    """The row, of the same group, that the chain begins like. None: it begins anew."""
    prefix_blocks: int
    """How many leading blocks it takes from there."""
    new: "array[int]"
    """The hashes after them, 64 bits each."""


class ChainEncoder:
    """Codes a group's chains in the order of its rows: a prefix of an earlier chain, and what is new.

    The new runs are the segments of a tree: each names the row whose run holds the block that it continues, and how
    many blocks stand before it. Nothing is assumed of the hashes: what is no chain, such as ids that come again
    elsewhere, is stored as it is.
    """

    def __init__(self) -> None:
        self._chains: list[Chain] = []
        self._rows: dict[int, int] = {}
        """By hash: the row whose run holds it."""

    def encode(self, chain: Chain) -> CodedChain:
        """The next row's chain; raises OverflowError, and takes nothing in, if a hash is not of 64 bits."""
        blocks = self._known(chain)
        row = self._rows[chain[blocks - 1]] if blocks else None
        new = array("Q", chain[blocks:])
        here = len(self._chains)
        self._chains.append(chain)
        for known in chain[blocks:]:
            self._rows.setdefault(known, here)
        return CodedChain(row, blocks, new)

    def _known(self, chain: Chain) -> int:
        """Leading blocks that an earlier row has: where one is known, so are those before it."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self._rows:
                low = middle
            else:
                high = middle - 1
        if low and self._chains[self._rows[chain[low - 1]]][:low] == chain[:low]:
            return low
        return 0
