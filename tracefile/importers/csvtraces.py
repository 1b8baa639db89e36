"""Published traces in CSV, BurstGPT's and Azure's: when, and how many tokens in and out; no block hashes.

BurstGPT: requests to ChatGPT and GPT-4 through Azure. Source: HPMLL/BurstGPT, ``Timestamp`` (seconds), ``Model``,
``Request tokens``, ``Response tokens``, ``Total tokens``, ``Log Type``; from BurstGPT_3.csv on also ``Session ID`` and
``Elapsed time`` (seconds to the whole answer). Its README: a request with 0 response tokens had failed.

Azure's LLM inference traces of 2023 and 2024, without sessions. Source: Azure/AzurePublicDataset,
AzureLLMInferenceDataset2023.md and …2024.md: ``TIMESTAMP`` (2023: ``2023-11-16 18:15:46.6805900``, 2024: ``2024-05-12
00:00:10.123456+00:00``), ``ContextTokens``, ``GeneratedTokens``.

Further columns, as Azure's multimodal trace of 2025 has ``NumImages``, are kept in ``extra``.
"""

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS, Meta, Record, RequestId, SessionId

BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
BURSTGPT_READ = {*BURSTGPT_COLUMNS, "Model", "Session ID", "Elapsed time", "Total tokens"}
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

Row = Mapping[str, str]


def header_of(line: bytes) -> list[str]:
    """The column names of a first line."""
    return [name.strip() for name in _cells(line.removeprefix(b"\xef\xbb\xbf"))]


def has_columns(line: bytes, columns: Collection[str]) -> bool:
    """Return whether a first line is a header with all of these columns."""
    try:
        return set(columns) <= set(header_of(line))
    except csv.Error:
        return False


def row_of(header: list[str], line: bytes, where: str) -> Row:
    """Split a line by column; raises InputError if it has not as many cells as the header."""
    try:
        cells = _cells(line)
    except csv.Error as error:
        raise InputError(f"{where}: {error}; expected a row of {len(header)} cells") from None
    if len(cells) != len(header):
        raise InputError(f"{where}: {len(cells)} cells; expected {len(header)}: {', '.join(header)}")
    return dict(zip(header, (cell.strip() for cell in cells), strict=True))


def number_of(row: Row, column: str, where: str) -> float:
    """A cell of 0 or more; raises InputError."""
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{where}: {column}: {row[column]!r}; expected a number of 0 or more")
    return value


def count_of(row: Row, column: str, where: str) -> int:
    """A whole cell of 0 or more; raises InputError."""
    value = number_of(row, column, where)
    if value % 1 or value > MOST_TOKENS:
        raise InputError(f"{where}: {column}: {row[column]!r}; expected a whole number up to {MOST_TOKENS:,}")
    return int(value)


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("utf-8", "replace")]), [])


class BurstGptDecoder:
    """BurstGPT's rows as records; t = 0 is the first row's time, ids are ``burstgpt-1``, ``-2``, … in file order."""

    def __init__(self, header: bytes) -> None:
        self.meta = Meta()
        self.warnings: Sequence[str] = ()
        self._columns = header_of(header)
        self._count = 0
        self._zero_s: float | None = None

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        row = row_of(self._columns, line, where)
        at_s = number_of(row, "Timestamp", where)
        self._zero_s = at_s if self._zero_s is None else self._zero_s
        self._count += 1
        output_tokens = count_of(row, "Response tokens", where)
        session = row.get("Session ID") or None
        record = Record(
            request_id=RequestId(f"burstgpt-{self._count}"),
            session_id=None if session is None else SessionId(session),
            session_source=None if session is None else "explicit",
            arrival_ms=(at_s - self._zero_s) * 1000,
            e2e_ms=number_of(row, "Elapsed time", where) * 1000 if row.get("Elapsed time") else None,
            status="ok" if output_tokens else "error",
            model=row.get("Model") or None,
            prompt_tokens=count_of(row, "Request tokens", where),
            output_tokens=output_tokens,
            tokens_source="usage",
            extra={name: value for name, value in row.items() if name not in BURSTGPT_READ},
        )
        return [record]


class AzureDecoder:
    """Azure's rows as records; t = 0 is the first row's time, ids are ``azure-1``, ``-2``, … in file order."""

    def __init__(self, header: bytes) -> None:
        self.meta = Meta()
        self.warnings: Sequence[str] = ()
        self._columns = header_of(header)
        self._count = 0
        self._zero: datetime | None = None

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        row = row_of(self._columns, line, where)
        at = _time(row["TIMESTAMP"], where)
        self._zero = self._zero or at
        self._count += 1
        record = Record(
            request_id=RequestId(f"azure-{self._count}"),
            arrival_ms=(at - self._zero).total_seconds() * 1000,
            prompt_tokens=count_of(row, "ContextTokens", where),
            output_tokens=count_of(row, "GeneratedTokens", where),
            tokens_source="tokenizer",
            extra={name: value for name, value in row.items() if name not in AZURE_COLUMNS},
        )
        return [record]


def _time(text: str, where: str) -> datetime:
    """A time with or without a zone: without one all are of the same."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{where}: TIMESTAMP: {text!r}; expected a date and a time") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
