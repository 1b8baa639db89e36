"""The hub: what a trace is, how it is read and written, hashed and threaded into sessions. Imports nothing of ours.

The import is light: a name's module is imported with its first use.
"""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip
from typing import TYPE_CHECKING

from tracefile.records.latenames import late_names

if TYPE_CHECKING:
    from tracefile.files.digest import trace_digest
    from tracefile.files.reading import TraceReader, load_trace, open_trace
    from tracefile.files.writing import TraceWriter
    from tracefile.hashing.blockhash import BlockHasher, HashKey, downsample, keyed_id, load_key
    from tracefile.records.encoding import encode_record
    from tracefile.records.errors import InputError
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

_MODULES = {
    "tracefile.files.digest": "trace_digest",
    "tracefile.files.reading": "TraceReader load_trace open_trace",
    "tracefile.files.writing": "TraceWriter",
    "tracefile.hashing.blockhash": "BlockHasher HashKey downsample keyed_id load_key",
    "tracefile.records.encoding": "encode_record",
    "tracefile.records.errors": "InputError",
    "tracefile.records.schema": "SCHEMA BlockHash Engine HashInfo Meta Record RequestId SessionId TraceFormat Workload",
    "tracefile.sessions": "SessionIndex SessionInference infer_sessions",
}
"""Names by module."""

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

__getattr__ = late_names(__name__, _MODULES)
