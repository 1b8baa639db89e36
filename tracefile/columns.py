"""A trace as a Parquet file for other tools: every field of a record is a column of its name, null where it is absent.

``rest`` is a JSON object of the fields that the schema does not know. Commands read lines.
"""

import os
from collections.abc import Iterable
from typing import Any

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.extras import load_extra
from tracefile.records.schema import Record
from tracefile.storage.appending import begin_replacement
from tracefile.storage.output import mode_like, refuse_inputs

NUMBERS = ("block_hashes", "output_block_hashes", "branch_hash")
"""Columns of 64 bits without a sign, whatever their values."""


def write_columns(
    path: str, records: Iterable[Record], *, inputs: Iterable[str | os.PathLike[str]], overwrite: bool = False
) -> int:
    """Write records in columns, complete or not at all; return their number. Holds them in memory.

    Raises InputError, also without pyarrow and for numbers beyond 64 bits.
    """
    pa, pq = (load_extra(name, where=f"{path}: Parquet ") for name in ("pyarrow", "pyarrow.parquet"))
    refuse_inputs(path, inputs)
    new = begin_replacement(path, overwrite=overwrite, mode=mode_like(inputs))
    try:
        rows = list(map(_row, records))
        names = [field.name for field in msgspec.structs.fields(Record) if field.name != "extra"]
        kinds = dict.fromkeys(NUMBERS[:2], pa.list_(pa.uint64())) | {NUMBERS[2]: pa.uint64()}
        columns = [pa.array([row.get(name) for row in rows], kinds.get(name)) for name in (*names, "rest")]
        pq.write_table(pa.table(columns, names=[*names, "rest"]), new.aside, compression="zstd")
        new.take_name()
    except (OverflowError, pa.ArrowException) as error:
        raise InputError(f"{path}: {error}; expected numbers of 64 bits") from None
    except OSError as error:
        raise InputError(f"{path}: cannot write ({error.strerror or error}); expected room") from error
    finally:
        new.abandon()
    return len(rows)


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(record)
    extra, headers = row.pop("extra", None), row.get("headers")
    row["rest"] = msgspec.json.encode(extra).decode() if extra else None
    return row if headers is None else row | {"headers": msgspec.json.encode(headers).decode()}
