"""Traces in columns, told by name and first bytes; pyarrow, which is optional, is imported when one is opened."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from tracefile.records.extras import load_extra
from tracefile.storage.remote import is_url

if TYPE_CHECKING:
    from tracefile.parquet.reading import ColumnsReader
    from tracefile.parquet.writing import ColumnsWriter

PARQUET_MAGIC = b"PAR1"


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
