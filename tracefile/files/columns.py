"""Traces in columns, with pyarrow imported only when such a trace is opened: the package is optional."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from tracefile.parquet.layout import Footer
from tracefile.records.extras import load_extra

if TYPE_CHECKING:
    from tracefile.parquet.reading import ColumnsReader
    from tracefile.parquet.writing import ColumnsWriter


def columns_reader(path: str | os.PathLike[str]) -> "ColumnsReader":
    """Return a reader of a trace in columns; raises InputError without pyarrow."""
    found: ColumnsReader = _module("tracefile.parquet.reading", path).ColumnsReader(path)
    return found


def columns_writer(path: str | os.PathLike[str]) -> "type[ColumnsWriter]":
    """Return the class that writes columns; raises InputError naming ``path`` without pyarrow."""
    found: type[ColumnsWriter] = _module("tracefile.parquet.writing", path).ColumnsWriter
    return found


def read_footer(path: str | os.PathLike[str]) -> Footer:
    """Return the file's own description; raises InputError if it is no kvtape trace."""
    found: Footer = _module("tracefile.parquet.reading", path).footer_of(path)
    return found


def _module(name: str, path: str | os.PathLike[str]) -> Any:
    load_extra("pyarrow", where=f"{os.fspath(path)}: Parquet ")
    return importlib.import_module(name)
