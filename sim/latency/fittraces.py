"""Traces that a model is fitted on, which must never validate it; each has a sample of its requests by hash.

A hash is of a request's name and its measured times: a part of the trace shares some, another capture of the same load
none.
"""

import os
from collections.abc import Container, Iterable, Sequence
from heapq import nsmallest
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from tracefile.records.errors import InputError
from tracefile.records.schema import Record

MOST = 256
"""Hashes of a sample: a part with one request in fifty shares some of them in 199 of 200 cases."""
_DIGITS = 12


class FitTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that the model was fitted on; such a trace must never validate the model."""

    digest: str
    """``trace_digest``: SHA-256 over the record lines."""
    name: str
    requests: int
    sample: list[str] = []
    """Hashes of some of its requests (``request_sample``). Empty: written before these were kept."""


def fit_trace(path: Path, digest: str, records: Sequence[Record]) -> FitTrace:
    return FitTrace(digest=digest, name=path.name, requests=len(records), sample=request_sample(records))


def refuse_fitted(
    fitted_on: Sequence[FitTrace], path: str | os.PathLike[str], digest: str, records: Iterable[Record] = ()
) -> None:
    """Raise InputError if a trace is one of ``fitted_on``, or if some of its ``records`` are in one of them."""
    for trace in fitted_on:
        if trace.digest == digest:
            raise InputError(
                f"{os.fspath(path)}: the model is fitted on this very trace ({trace.name}, digest {digest[:12]}…); "
                "expected a trace it has not seen"
            )
    name_of = {mark: trace.name for trace in fitted_on for mark in trace.sample}
    if (shared := first_shared(name_of, records)) is not None:
        raise InputError(
            f"{os.fspath(path)}: has requests of {name_of[shared]}, which the model is fitted on; expected a trace it "
            "has not seen"
        )


def request_sample(records: Iterable[Record]) -> list[str]:
    """Smallest hashes of the requests that have times, in order."""
    return nsmallest(MOST, {_hash(record) for record in records if _is_timed(record)})


def first_shared(sample: Container[str], records: Iterable[Record]) -> str | None:
    """Hash of the first request that is in the sample; None: there is none."""
    return next((digest for record in records if _is_timed(record) and (digest := _hash(record)) in sample), None)


def _is_timed(record: Record) -> bool:
    return record.arrival_ms is not None and record.e2e_ms is not None


def _hash(record: Record) -> str:
    text = f"{record.request_id} {record.arrival_ms!r} {record.ttft_ms!r} {record.e2e_ms!r}"
    return xxh3_64_hexdigest(text.encode())[:_DIGITS]
