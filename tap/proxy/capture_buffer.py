"""Bounded copy of a request's and response's bytes while they pass through the proxy.

Keeps references to socket reads with their arrival times; parses nothing. The path selects the endpoint: endpoints of
``wire.answer`` are captured in full, other POSTs to ``/v1/…`` or to an engine's generation API by their shape. A
gateway's path prefix is removed, and unknown path segments become ``*``: ``/v1/responses/*/cancel``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from tap.ipc.messages import RECORDED_REQUEST_HEADERS, RECORDED_RESPONSE_HEADERS, CapturedExchange, Endpoint
from tap.ipc.settings import Injection
from tracefile.records.schema import Status
from wire.answer import GENERATING
from wire.head import Headers

_GENERATING = (
    (b"/chat/completions", "/v1/chat/completions"),
    (b"/completions", "/v1/completions"),
    (b"/completion", "/completion"),
    (b"/v1/responses", "/v1/responses"),
    (b"/v1/messages", "/v1/messages"),
    (b"/infill", "/infill"),
)
_UNVERSIONED = {b"/responses": "/v1/responses"}
"""Paths that llama.cpp also serves without ``/v1``."""
_ENGINE_GENERATION = {b"generate", b"generate_stream", b"chat", b"invocations", b"converse", b"converse-stream"}
"""Last path segment of engine-specific generation APIs: SGLang, TGI, Ollama, Bedrock."""
_UNRECORDED = frozenset(
    {"tokenize", "detokenize", "count_tokens", "load_lora_adapter", "unload_lora_adapter", "files", "uploads"}
)
"""Segments of paths without inference: token counting, administration, storage."""
_API_WORDS = frozenset(
    {"chat", "completions", "completion", "responses", "messages", "embeddings", "embedding", "rerank", "score"}
    | {"classify", "pooling", "moderations", "audio", "speech", "transcriptions", "translations", "images"}
    | {"generations", "edits", "variations", "videos", "models", "engines", "deployments", "batches", "cancel"}
    | {"realtime", "sessions", "assistants", "threads", "runs", "conversations", "items", "input_tokens", "compact"}
    | {"generate", "complete", "infill", "fine_tuning", "jobs", "vector_stores", "search", "inference", "reasoning"}
)
"""Path segments of engine and gateway APIs. Other segments may be ids of a client, and are not recorded."""
_WORD = re.compile(r"[a-z][a-z_-]{0,31}")
MAX_WORDS = 5
SHAPE_BYTES = 1 << 20
"""Capture limit of a body on endpoints without output tokens: audio and batch files are large."""


def recorded_endpoint(target: bytes) -> Endpoint | None:
    """Return the endpoint of a POST, independent of the path's percent-encoding; None: not recorded."""
    return _endpoint_of(target.partition(b"?")[0])


@lru_cache(maxsize=256)
def _endpoint_of(path: bytes) -> Endpoint | None:
    path = unquote_to_bytes(path.partition(b"#")[0])
    for ending, endpoint in _GENERATING:
        if path.endswith(ending):
            return endpoint
    if path in _UNVERSIONED:
        return _UNVERSIONED[path]
    _, version, suffix = path.rpartition(b"/v1/")
    if not version:
        last_word = path.rpartition(b"/")[2]
        return f"/{last_word.decode()}" if last_word in _ENGINE_GENERATION else None
    words = suffix.decode("latin-1").strip("/").split("/")
    if len(words) > MAX_WORDS or _UNRECORDED.intersection(words):
        return None
    if len(words) == 1 and not _WORD.fullmatch(words[0]):
        return None
    return "/v1/" + "/".join(word if word in _API_WORDS else "*" for word in words)


def capture_limit_bytes(endpoint: Endpoint, limit: int) -> int:
    """Return the capture limit of a body; ``limit`` applies to endpoints that generate tokens."""
    return limit if endpoint in GENERATING else min(limit, SHAPE_BYTES)


LAST_READS = 8
"""Number of last reads kept of a response beyond the capture limit; they hold a stream's usage."""
READ_OVERHEAD_BYTES = 120
"""Memory overhead of a captured read."""


@dataclass(slots=True)
class CaptureBudget:
    """Memory budget of all captures in flight. Beyond the budget, captures are dropped; relayed traffic never is."""

    limit_bytes: int
    used_bytes: int = 0


class CaptureBuffer:
    """Capture of one exchange, sent to the recorder at its end. A dropped capture holds no reads."""

    __slots__ = (
        "_budget",
        "_exchange",
        "_max_body_bytes",
        "_reads",
        "_used_bytes",
        "dropped",
        "request_bytes",
        "response_bytes",
    )

    def __init__(
        self,
        budget: CaptureBudget,
        max_body_bytes: int,
        *,
        endpoint: Endpoint,
        arrival_ns: int,
        concurrency: int,
        headers: Headers,
        names: Sequence[bytes],
        recorded: frozenset[bytes] = RECORDED_REQUEST_HEADERS,
    ) -> None:
        self._budget, self._max_body_bytes = budget, max_body_bytes
        self._exchange = CapturedExchange(
            endpoint=endpoint,
            arrival_ns=arrival_ns,
            concurrency=concurrency,
            request_headers={} if recorded.isdisjoint(names) else _first_values(headers, names, recorded),
        )
        self._reads = self._exchange.response_reads
        self._used_bytes = 0
        self.dropped: str | None = None
        self.request_bytes = self.response_bytes = 0
        """Bytes of the bodies, captured or not."""

    def request_body(self, data: bytes) -> None:
        self.request_bytes += len(data)
        body = self._exchange.request_body
        if body is None or self.dropped is not None:
            return
        if self.request_bytes > self._max_body_bytes:
            self._release(self.request_bytes - len(data) + READ_OVERHEAD_BYTES * len(body))
            self._exchange.request_body = None
            return
        body.append(data)
        self._reserve(len(data) + READ_OVERHEAD_BYTES)

    def sent_to(self, upstream: str) -> None:
        self._exchange.upstream = upstream

    def add_injected(self, injected: Sequence[Injection]) -> None:
        self._exchange.injected = list(injected)

    def response_head(self, status: int, headers: Headers, names: Sequence[bytes]) -> None:
        self._exchange.http_status = status
        self._exchange.response_headers = _first_values(headers, names, RECORDED_RESPONSE_HEADERS)

    def response_body(self, at_ns: int, data: bytes) -> None:
        """Append a de-chunked read with its token arrival time; beyond the limit, keep only the last few reads."""
        size = len(data)
        self.response_bytes += size
        if self.dropped is not None or not size:
            return
        if self.response_bytes > self._max_body_bytes:
            self._exchange.response_complete = False
            self._exchange.last_reads = [*self._exchange.last_reads[1 - LAST_READS :], (at_ns, data)]
            return
        self._reads.append((at_ns, data))
        # Inlined _reserve: a function call for each streamed token would cost throughput.
        size += READ_OVERHEAD_BYTES
        self._used_bytes += size
        budget = self._budget
        budget.used_bytes += size
        if budget.used_bytes > budget.limit_bytes:
            self.drop("queue_full")

    def finish(self, end_ns: int, outcome: Status, error_kind: str | None) -> CapturedExchange:
        exchange = self._exchange
        exchange.end_ns, exchange.outcome, exchange.error_kind = end_ns, outcome, error_kind
        self._budget.used_bytes -= self._used_bytes
        self._used_bytes = 0
        return exchange

    def drop(self, reason: str) -> None:
        self.dropped = reason
        self._exchange.request_body = None
        self._reads = self._exchange.response_reads = self._exchange.last_reads = []
        self._release(self._used_bytes)

    def _reserve(self, size: int) -> None:
        self._used_bytes += size
        self._budget.used_bytes += size
        if self._budget.used_bytes > self._budget.limit_bytes:
            self.drop("queue_full")

    def _release(self, size: int) -> None:
        self._used_bytes -= size
        self._budget.used_bytes -= size


def _first_values(headers: Headers, names: Sequence[bytes], recorded: frozenset[bytes]) -> dict[str, str]:
    """Return the first value of each wanted header. ``names``: lower-case header names, parallel to ``headers``."""
    values: dict[str, str] = {}
    for lower, (_, value) in zip(names, headers, strict=True):
        if lower in recorded:
            values.setdefault(lower.decode("ascii"), value.decode("latin-1"))
    return values
