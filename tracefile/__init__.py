"""The hub: what a trace is, how it is read and written, hashed and threaded into sessions. Imports nothing of ours."""

from tracefile.digest import trace_digest
from tracefile.errors import InputError
from tracefile.reading import TraceFormat, TraceReader, load_trace, open_trace
from tracefile.schema import (
    SCHEMA,
    BlockHash,
    Engine,
    HashInfo,
    Meta,
    Record,
    RequestId,
    SessionId,
    Workload,
)
from tracefile.writing import TraceWriter, encode_record

__all__ = [
    "SCHEMA",
    "BlockHash",
    "Engine",
    "HashInfo",
    "InputError",
    "Meta",
    "Record",
    "RequestId",
    "SessionId",
    "TraceFormat",
    "TraceReader",
    "TraceWriter",
    "Workload",
    "encode_record",
    "load_trace",
    "open_trace",
    "trace_digest",
]
