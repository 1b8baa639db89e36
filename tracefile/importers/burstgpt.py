"""BurstGPT: requests to ChatGPT and GPT-4 through Azure; when, and how many tokens in and out; no sharing.

Source: HPMLL/BurstGPT, CSV of ``Timestamp`` (seconds), ``Model``, ``Request tokens``, ``Response tokens``,
``Total tokens``, ``Log Type``; from BurstGPT_3.csv on also ``Session ID`` and ``Elapsed time`` (seconds to the whole
answer). Its README: a request with 0 response tokens had failed.
"""

from collections.abc import Sequence

from tracefile.importers.csvrows import Row, count_of, header_of, number_of, row_of
from tracefile.records.schema import Meta, Record, RequestId, SessionId

TIME, PROMPT, OUTPUT = COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
MODEL, SESSION, ELAPSED = "Model", "Session ID", "Elapsed time"
READ = {*COLUMNS, MODEL, SESSION, ELAPSED, "Total tokens"}


class BurstGptDecoder:
    """BurstGPT's rows as records; t = 0 is the first row's time, ids are ``burstgpt-1``, ``-2``, … in file order."""

    def __init__(self, header: bytes) -> None:
        self.meta = Meta()
        self.warnings: Sequence[str] = ()
        self._columns = header_of(header)
        self._count = 0
        self._zero_s: float | None = None

    def decode(self, line: bytes, where: str) -> Record:
        row = row_of(self._columns, line, where)
        at_s = number_of(row, TIME, where)
        self._zero_s = at_s if self._zero_s is None else self._zero_s
        self._count += 1
        output_tokens = count_of(row, OUTPUT, where)
        session = row.get(SESSION) or None
        return Record(
            request_id=RequestId(f"burstgpt-{self._count}"),
            session_id=None if session is None else SessionId(session),
            session_source=None if session is None else "explicit",
            arrival_ms=(at_s - self._zero_s) * 1000,
            e2e_ms=_elapsed_ms(row, where),
            status="ok" if output_tokens else "error",
            model=row.get(MODEL) or None,
            prompt_tokens=count_of(row, PROMPT, where),
            output_tokens=output_tokens,
            tokens_source="usage",
            extra={name: value for name, value in row.items() if name not in READ},
        )


def _elapsed_ms(row: Row, where: str) -> float | None:
    return number_of(row, ELAPSED, where) * 1000 if row.get(ELAPSED) else None
