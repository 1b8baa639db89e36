"""Side copy of an exchange while it passes: references to the reads, within bounds, without work on their content.

The path, decoded as engines decode it, tells the endpoint: those of ``wire.answer`` are read in full, other POSTs to
``/v1/…`` or to an engine's own generation recorded by their shape. A gateway's prefix is removed, and words of no known
API become ``*``: ``/v1/responses/*/cancel``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from tap.ipc.messages import KEPT_REQUEST_HEADERS, KEPT_RESPONSE_HEADERS, Endpoint, ExchangeCopy
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
_AT_ROOT = {b"/responses": "/v1/responses"}
"""Paths that llama.cpp serves without a version too."""
_OWN_GENERATION = {b"generate", b"generate_stream", b"chat", b"invocations", b"converse", b"converse-stream"}
"""Last words of paths where engines and clouds generate by an API of their own: SGLang, TGI, Ollama, Bedrock."""
_UNRECORDED = frozenset(
    {"tokenize", "detokenize", "count_tokens", "load_lora_adapter", "unload_lora_adapter", "files", "uploads"}
)
"""Words in paths without inference: counting, administration, storage."""
_KNOWN = frozenset(
    {"chat", "completions", "completion", "responses", "messages", "embeddings", "embedding", "rerank", "score"}
    | {"classify", "pooling", "moderations", "audio", "speech", "transcriptions", "translations", "images"}
    | {"generations", "edits", "variations", "videos", "models", "engines", "deployments", "batches", "cancel"}
    | {"realtime", "sessions", "assistants", "threads", "runs", "conversations", "items", "input_tokens", "compact"}
    | {"generate", "complete", "infill", "fine_tuning", "jobs", "vector_stores", "search", "inference", "reasoning"}
)
"""Words of the APIs of engines and gateways, which no client chooses."""
_WORD = re.compile(r"[a-z][a-z_-]{0,31}")
MAX_WORDS = 5
SHAPE_BYTES = 1 << 20
"""Most bytes copied of a body on an endpoint that generates no tokens: audio and batches are large, and tell little."""


def recorded_endpoint(target: bytes) -> Endpoint | None:
    """Return the endpoint of a POST, the same for each encoding of its path; null: not recorded."""
    return _endpoint_of(target.partition(b"?")[0])


@lru_cache(maxsize=256)
def _endpoint_of(path: bytes) -> Endpoint | None:
    path = unquote_to_bytes(path.partition(b"#")[0])
    for ending, endpoint in _GENERATING:
        if path.endswith(ending):
            return endpoint
    if path in _AT_ROOT:
        return _AT_ROOT[path]
    _, version, rest = path.rpartition(b"/v1/")
    if not version:
        own = path.rpartition(b"/")[2]
        return f"/{own.decode()}" if own in _OWN_GENERATION else None
    words = rest.decode("latin-1").strip("/").split("/")
    if len(words) > MAX_WORDS or _UNRECORDED.intersection(words):
        return None
    if len(words) == 1 and not _WORD.fullmatch(words[0]):
        return None
    return "/v1/" + "/".join(word if word in _KNOWN else "*" for word in words)


def copied_bytes(endpoint: Endpoint, limit: int) -> int:
    """Return the most bytes to copy of a body; ``limit`` is for endpoints that generate tokens."""
    return limit if endpoint in GENERATING else min(limit, SHAPE_BYTES)


LAST_READS = 8
"""Last reads kept of a response too large to copy; a stream's usage is in them."""
READ_OVERHEAD_BYTES = 120
"""Memory of a read beside its bytes."""


@dataclass(slots=True)
class CopyBudget:
    """Bytes that all copies in flight may hold together; beyond it copies are dropped, never the traffic."""

    limit_bytes: int
    held_bytes: int = 0


class CaptureBuffer:
    """Copy of an exchange, which becomes the message to the recorder. A dropped copy holds no reads."""

    __slots__ = (
        "_budget",
        "_exchange",
        "_held",
        "_max_body_bytes",
        "_reads",
        "dropped",
        "request_bytes",
        "response_bytes",
    )

    def __init__(
        self,
        budget: CopyBudget,
        max_body_bytes: int,
        *,
        endpoint: Endpoint,
        arrival_ns: int,
        concurrency: int,
        headers: Headers,
        names: Sequence[bytes],
        kept_headers: frozenset[bytes] = KEPT_REQUEST_HEADERS,
    ) -> None:
        self._budget, self._max_body_bytes = budget, max_body_bytes
        self._exchange = ExchangeCopy(
            endpoint=endpoint,
            arrival_ns=arrival_ns,
            concurrency=concurrency,
            request_headers={} if kept_headers.isdisjoint(names) else _kept(headers, names, kept_headers),
        )
        self._reads = self._exchange.response_reads
        self._held = 0
        self.dropped: str | None = None
        self.request_bytes = self.response_bytes = 0
        """Bytes of the bodies, copied or not."""

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
        self._hold(len(data) + READ_OVERHEAD_BYTES)

    def sent_to(self, upstream: str) -> None:
        self._exchange.upstream = upstream

    def add_injected(self, injected: Sequence[Injection]) -> None:
        self._exchange.injected = list(injected)

    def response_head(self, status: int, headers: Headers, names: Sequence[bytes]) -> None:
        self._exchange.http_status = status
        self._exchange.response_headers = _kept(headers, names, KEPT_RESPONSE_HEADERS)

    def response_body(self, at_ns: int, data: bytes) -> None:
        """Keep a de-chunked read with its time; beyond the bound only the last few."""
        size = len(data)
        self.response_bytes += size
        if self.dropped is not None or not size:
            return
        if self.response_bytes > self._max_body_bytes:
            self._exchange.response_whole = False
            self._exchange.last_reads = [*self._exchange.last_reads[1 - LAST_READS :], (at_ns, data)]
            return
        self._reads.append((at_ns, data))
        # As in _hold: a call for each chunk would show.
        size += READ_OVERHEAD_BYTES
        self._held += size
        budget = self._budget
        budget.held_bytes += size
        if budget.held_bytes > budget.limit_bytes:
            self.give_up("queue_full")

    def finish(self, end_ns: int, outcome: Status, error_kind: str | None) -> ExchangeCopy:
        exchange = self._exchange
        exchange.end_ns, exchange.outcome, exchange.error_kind = end_ns, outcome, error_kind
        self._budget.held_bytes -= self._held
        self._held = 0
        return exchange

    def give_up(self, reason: str) -> None:
        self.dropped = reason
        self._exchange.request_body = None
        self._reads = self._exchange.response_reads = self._exchange.last_reads = []
        self._release(self._held)

    def _hold(self, size: int) -> None:
        self._held += size
        self._budget.held_bytes += size
        if self._budget.held_bytes > self._budget.limit_bytes:
            self.give_up("queue_full")

    def _release(self, size: int) -> None:
        self._held -= size
        self._budget.held_bytes -= size


def _kept(headers: Headers, names: Sequence[bytes], wanted: frozenset[bytes]) -> dict[str, str]:
    """Return the first of each wanted header. ``names``: the headers' names in lower case, parallel to them."""
    kept: dict[str, str] = {}
    for lower, (_, value) in zip(names, headers, strict=True):
        if lower in wanted:
            kept.setdefault(lower.decode("ascii"), value.decode("latin-1"))
    return kept
