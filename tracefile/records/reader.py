"""The reader of a trace."""

from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tracefile.records.decoding import OutOfBoundsError
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, TraceFormat

if TYPE_CHECKING:
    from tracefile.records.batches import Batch


class TraceReader:
    """A trace's header, then its records one by one; a context manager and an iterator.

    A last line that a killed writer left torn is no error: iteration ends before it, and ``warnings`` says so.
    Everything else malformed raises InputError with ``file:line: field``. Constant memory.
    """

    def __init__(self, path: str, trace_format: TraceFormat) -> None:
        self.path = path
        self.format = trace_format
        self.faults: list[tuple[int, str]] = []
        """Ends that files lack, each with its line: a check's findings. Complete after the last record."""
        self._first_set_aside = ""
        self._set_aside = 0
        self._records = self._read_records()

    @property
    def meta(self) -> Meta:
        """The trace's first header; for imported formats, as far as the format has one."""
        raise NotImplementedError

    @property
    def latest_meta(self) -> Meta:
        """The last header before the latest record: a trace may go on with another engine."""
        raise NotImplementedError

    @property
    def line(self) -> int:
        """Line (or row) of the latest record, from 1; counted through all segments."""
        raise NotImplementedError

    @property
    def warnings(self) -> list[str]:
        """Everything skipped, dropped or assumed so far, a sentence each; complete after the last record."""
        found = [f"{self.where(line)}: {what}" for line, what in self.faults]
        if self._set_aside:
            count = f"{self._set_aside} records have values out of bounds, read as unknown"
            found.append(f"{self.path}: {count}; the first: {self._first_set_aside}")
        return found

    def where(self, line: int | None = None) -> str:
        """``file:line`` of a line read (default: the latest); in a trace of segments, of the segment's file."""
        raise NotImplementedError

    def results(self) -> Iterator[Record | InputError]:
        """Iterate as over the reader, but yield a bad line's InputError and go on with the next line."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file; records not read yet are lost."""
        raise NotImplementedError

    def batches(self) -> "Iterator[Batch]":
        """Iterate over the records in groups, as arrays where the file stores arrays."""
        # A tap's workers read headers only and must not import NumPy.
        from tracefile.records.batches import BATCH, RecordBatch  # noqa: PLC0415

        while some := list(islice(self._records, BATCH)):
            yield RecordBatch(some)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Record]:
        return self._records

    def __next__(self) -> Record:
        return next(self._records)

    def _read_records(self) -> Iterator[Record]:
        for result in self.results():
            if isinstance(result, InputError):
                yield self._without_faults(result)
            else:
                yield result

    def _without_faults(self, error: InputError) -> Record:
        """Return the record of a line whose values out of bounds are set aside; raises any other error."""
        if not isinstance(error, OutOfBoundsError):
            raise error
        self._set_aside += 1
        self._first_set_aside = self._first_set_aside or str(error)
        return error.record
