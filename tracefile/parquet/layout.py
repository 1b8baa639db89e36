"""Layout of a trace in columns: a Parquet file's name, its footer and its columns.

Every field of a record is a column of its name, with three exceptions. The two lists of hashes are one chain, stored
in parts (``tracefile.parquet.writing``). ``rest`` is a JSON object of everything without a column: unknown fields
and numbers beyond 64 bits. A row group needs no other row group, so readers and writers hold one at a time.
"""

import os
from typing import Any

import msgspec

from tracefile.records.schema import SCHEMA
from tracefile.storage.remote import is_url

PARQUET_MAGIC = b"PAR1"
FOOTER_KEY = b"kvtape"
REST = "rest"
"""Column for the fields without a column; null: none."""


class Footer(msgspec.Struct, kw_only=True):
    """The file's key-value metadata under ``kvtape``."""

    schema: str = SCHEMA
    records: int
    """Rows written. Another number of rows means another tool, which cannot keep the chains whole."""
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
