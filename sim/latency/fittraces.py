"""Traces of a fit, which must not validate the latency model; each has a sample of request hashes.

A hash covers a request's id and its measured times: a subset of the trace shares hashes, another capture of the same
load shares none.
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
"""Hashes of a sample: a subset with one request in fifty shares a hash in 199 of 200 cases."""
_DIGITS = 12


class FitTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Trace of a fit; it must not validate the latency model."""

    digest: str
    """``trace_digest``: SHA-256 over the record lines."""
    name: str
    requests: int
    sample: list[str] = []
    """Sample of request hashes (``request_sample``). Empty: written by an earlier version."""


def fit_trace(path: Path, digest: str, records: Sequence[Record]) -> FitTrace:
    return FitTrace(digest=digest, name=path.name, requests=len(records), sample=request_sample(records))


def refuse_fitted(
    fitted_on: Sequence[FitTrace], path: str | os.PathLike[str], digest: str, records: Iterable[Record] = ()
) -> None:
    """Raise InputError if a trace or some of its ``records`` belong to the fit of the latency model."""
    for trace in fitted_on:
        if trace.digest == digest:
            raise InputError(
                f"{os.fspath(path)}: the model was fitted on this trace ({trace.name}, digest {digest[:12]}…); "
                "expected another trace"
            )
    name_of = {mark: trace.name for trace in fitted_on for mark in trace.sample}
    if (shared := first_shared(name_of, records)) is not None:
        raise InputError(
            f"{os.fspath(path)}: has requests of {name_of[shared]}, a trace of the model's fit; expected another trace"
        )


def request_sample(records: Iterable[Record]) -> list[str]:
    """Return the smallest hashes of the requests with recorded latencies, ascending."""
    return nsmallest(MOST, {_hash(record) for record in records if _is_timed(record)})


def first_shared(sample: Container[str], records: Iterable[Record]) -> str | None:
    """Return the hash of the first request in the sample; None: no request is."""
    return next((digest for record in records if _is_timed(record) and (digest := _hash(record)) in sample), None)


def _is_timed(record: Record) -> bool:
    return record.arrival_ms is not None and record.e2e_ms is not None


def _hash(record: Record) -> str:
    text = f"{record.request_id} {record.arrival_ms!r} {record.ttft_ms!r} {record.e2e_ms!r}"
    return xxh3_64_hexdigest(text.encode())[:_DIGITS]
