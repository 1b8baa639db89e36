"""Azure's LLM inference traces of 2023 and 2024: when, and how many tokens in and out; no sessions, no sharing.

Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and …2024.md: CSV of ``TIMESTAMP`` (2023:
``2023-11-16 18:15:46.6805900``, 2024: ``2024-05-12 00:00:10.123456+00:00``), ``ContextTokens``, ``GeneratedTokens``.
Further columns, as the multimodal trace of 2025 has ``NumImages``, are kept in ``extra``.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from tracefile.importers.csvrows import count_of, header_of, row_of
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId

TIME, PROMPT, OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureDecoder:
    """Azure's rows as records; t = 0 is the first row's time, ids are ``azure-1``, ``-2``, … in file order."""

    def __init__(self, header: bytes) -> None:
        self.meta = Meta()
        self.warnings: Sequence[str] = ()
        self._columns = header_of(header)
        self._count = 0
        self._zero: datetime | None = None

    def decode(self, line: bytes, where: str) -> Record:
        row = row_of(self._columns, line, where)
        at = _time(row[TIME], where)
        self._zero = self._zero or at
        self._count += 1
        return Record(
            request_id=RequestId(f"azure-{self._count}"),
            arrival_ms=(at - self._zero).total_seconds() * 1000,
            prompt_tokens=count_of(row, PROMPT, where),
            output_tokens=count_of(row, OUTPUT, where),
            tokens_source="tokenizer",
            extra={name: value for name, value in row.items() if name not in COLUMNS},
        )


def _time(text: str, where: str) -> datetime:
    """A time with or without a zone: without one all are of the same."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{where}: {TIME}: {text!r}; expected a date and a time") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
