"""A trace in columns: what a Parquet file of ours is called, says of itself, and needs.

Every field of a record is a column of its name, but for three: the two lists of hashes are one chain, stored in parts
(``tracefile.parquet.chaincoding``), and ``rest`` is a JSON object of what has no column: unknown fields, numbers
that no
column holds. A row group stands for itself, so that readers and writers hold one at a time.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import SCHEMA

if TYPE_CHECKING:
    from tracefile.parquet.reading import ColumnsReader
    from tracefile.parquet.writing import ColumnsWriter

PARQUET_MAGIC = b"PAR1"
SUFFIX = ".parquet"
FOOTER_KEY = b"kvtape"
REST = "rest"
"""The column of what has none; null: nothing."""


class Footer(msgspec.Struct, kw_only=True):
    """What the file's key-value metadata says under ``kvtape``."""

    schema: str = SCHEMA
    records: int
    """Rows that were written. A file with others was made by another tool, which cannot keep the chains whole."""
    digest: str
    """``trace_digest`` of the same records as JSON Lines."""
    metas: list[tuple[int, dict[str, Any]]]
    """Each header, and how many rows come before it."""


def is_parquet(path: str | os.PathLike[str]) -> bool:
    """Whether it is a file whose first bytes are Parquet's."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError:
        return False


def has_parquet_suffix(path: str | os.PathLike[str]) -> bool:
    """Whether a writer is asked for columns."""
    return os.fspath(path).endswith(SUFFIX)


def columns_reader(path: str | os.PathLike[str]) -> "ColumnsReader":
    """A reader of a trace in columns; raises InputError without pyarrow."""
    found: ColumnsReader = _module("tracefile.parquet.reading", path).ColumnsReader(path)
    return found


def columns_writer(path: str | os.PathLike[str]) -> "type[ColumnsWriter]":
    """Who writes columns to ``path``; raises InputError without pyarrow."""
    found: type[ColumnsWriter] = _module("tracefile.parquet.writing", path).ColumnsWriter
    return found


def read_footer(path: str | os.PathLike[str]) -> Footer:
    """What the file says of itself; raises InputError if it is no trace of ours."""
    found: Footer = _module("tracefile.parquet.reading", path).footer_of(path)
    return found


def _module(name: str, path: str | os.PathLike[str]) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise InputError(
            f"{os.fspath(path)}: Parquet, which needs pyarrow; expected `pip install kvtape[parquet]`"
        ) from None
