"""Layout of a trace in columns: a Parquet file's name, its footer and its columns.

Every field of a record is a column of its name. ``rest`` is a JSON object of everything without a column: unknown
fields and numbers beyond 64 bits. Readers and writers hold a row group at a time. pyarrow, which is optional, is
imported only when such a trace is opened.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

import msgspec

from tracefile.records.extras import load_extra
from tracefile.records.schema import SCHEMA
from tracefile.storage.remote import is_url

if TYPE_CHECKING:
    from tracefile.parquet.reading import ColumnsReader
    from tracefile.parquet.writing import ColumnsWriter

PARQUET_MAGIC = b"PAR1"
FOOTER_KEY = b"kvtape"
REST = "rest"
"""Column for the fields without a column; null: none."""


class Footer(msgspec.Struct, kw_only=True):
    """The file's key-value metadata under ``kvtape``."""

    schema: str = SCHEMA
    records: int
    """Rows written. Another number of rows means that another tool wrote the file."""
    digest: str
    """``trace_digest`` of the same records as JSON Lines."""
    metas: list[tuple[int, dict[str, Any]]]
    """Each header, and how many rows come before it."""


def is_parquet(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a file with Parquet's first bytes, or a URL with its suffix."""
    if is_url(os.fspath(path)):
        return has_parquet_suffix(path)
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError:
        return False


def has_parquet_suffix(path: str | os.PathLike[str]) -> bool:
    """Return whether the path asks a writer for columns."""
    return os.fspath(path).endswith(".parquet")


def columns_reader(path: str | os.PathLike[str]) -> "ColumnsReader":
    """Return a reader of a trace in columns; raises InputError without pyarrow."""
    reader: ColumnsReader = _module("tracefile.parquet.reading", path).ColumnsReader(path)
    return reader


def columns_writer(path: str | os.PathLike[str]) -> "type[ColumnsWriter]":
    """Return the class that writes columns; raises InputError naming ``path`` without pyarrow."""
    writer: type[ColumnsWriter] = _module("tracefile.parquet.writing", path).ColumnsWriter
    return writer


def _module(name: str, path: str | os.PathLike[str]) -> Any:
    load_extra("pyarrow", where=f"{os.fspath(path)}: Parquet ")
    return importlib.import_module(name)
