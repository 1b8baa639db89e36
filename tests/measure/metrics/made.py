"""Records and runs of a few requests, for hand-computed metrics."""

from collections.abc import Sequence
from typing import Any

from measure.runs import Run, make_run
from tracefile.records.schema import Meta, Record, RequestId


def request(name: str, arrival_ms: float, **hashed: Any) -> Record:
    """A streamed request with the fields that are given; gaps carry one token each unless ``itl_tokens`` says."""
    gaps = hashed.get("itl_ms", [])
    return Record(
        request_id=RequestId(name),
        arrival_ms=arrival_ms,
        stream=True,
        **{"itl_tokens": [1] * len(gaps), **hashed},
    )


def run_of(records: Sequence[Record], **meta: Any) -> Run:
    """The records as a run, with the hits of an unlimited cache if there are hashes."""
    return make_run("run", "run.jsonl", Meta(**{"source": "client", **meta}), records, chains=True)
