"""Sample of a trace's requests by hash, by which a part of the trace is known again.

A hash is of a request's name and its measured times: another capture of the same load shares none.
"""

from collections.abc import Container, Iterable
from heapq import nsmallest

from xxhash import xxh3_64_hexdigest

from tracefile.records.schema import Record

MOST = 256
"""Hashes of a sample: a part with one request in fifty shares some of them in 199 of 200 cases."""
_DIGITS = 12


def request_sample(records: Iterable[Record]) -> list[str]:
    """Smallest hashes of the requests that have times, in order."""
    return nsmallest(MOST, {_hash(record) for record in records if _is_timed(record)})


def first_shared(sample: Container[str], records: Iterable[Record]) -> str | None:
    """Hash of the first request that is in the sample; None: there is none."""
    return next((found for record in records if _is_timed(record) and (found := _hash(record)) in sample), None)


def _is_timed(record: Record) -> bool:
    return record.arrival_ms is not None and record.e2e_ms is not None


def _hash(record: Record) -> str:
    told = f"{record.request_id} {record.arrival_ms!r} {record.ttft_ms!r} {record.e2e_ms!r}"
    return xxh3_64_hexdigest(told.encode())[:_DIGITS]
