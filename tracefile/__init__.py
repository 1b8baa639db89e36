"""The hub: what a trace is, how it is read and written, hashed and threaded into sessions. Imports nothing of ours."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace, open_trace
from tracefile.files.writing import TraceWriter
from tracefile.hashing.blockhash import BlockHasher, HashKey, downsample, keyed_id, load_key
from tracefile.records.encoding import encode_record
from tracefile.records.errors import InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import (
    SCHEMA,
    BlockHash,
    Engine,
    HashInfo,
    Meta,
    Record,
    RequestId,
    SessionId,
    TraceFormat,
    Workload,
)
from tracefile.sessions import SessionIndex, SessionInference, infer_sessions

__all__ = [
    "SCHEMA",
    "BlockHash",
    "BlockHasher",
    "Engine",
    "HashInfo",
    "HashKey",
    "InputError",
    "Meta",
    "Record",
    "RequestId",
    "SessionId",
    "SessionIndex",
    "SessionInference",
    "TraceFormat",
    "TraceReader",
    "TraceWriter",
    "Workload",
    "downsample",
    "encode_record",
    "infer_sessions",
    "keyed_id",
    "load_key",
    "load_trace",
    "open_trace",
    "trace_digest",
]
