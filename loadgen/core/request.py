"""Request that is ready to be written to a socket, with its token limits."""

from collections.abc import Sequence

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import RequestId, SessionId
from wire.errors import WireError
from wire.url import Origin, parse_url

Headers = tuple[tuple[bytes, bytes], ...]
SESSION_HEADER = "X-Session-ID"

MOST_RESPONSE_BYTES = 64 << 20
"""Bound of any response, which is buffered until its end."""
LEAST_RESPONSE_BYTES = 1 << 20
"""Bound that every response may reach: errors, keep-alives, engines without ``max_tokens``."""
BYTES_PER_TOKEN = 1024
"""Bound for an output token: engines' events have 150 to 500 bytes."""
BYTES_PER_REQUEST_BYTE = 64
"""Bound for the parts of its request that a response repeats: prompt ids, text and instructions, some three times."""
LOGPROBS_TIMES = 8
"""Factor of both bounds if log probabilities may be requested: with 20 of them, a token's event has 3 KB."""


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Serialised request, and the planned fields of its record: ids, prompt tokens, output token limit."""

    request_id: RequestId
    """Id in the trace; the HTTP header has the plan's id."""
    path: str
    headers: Headers
    body: bytes
    model: str
    max_tokens: int
    prompt_tokens: int | None = None
    """Planned; null: only the engine's tokenizer can count them (chat). Usage overrides it."""
    stream: bool = True
    session_id: SessionId | None = None
    parent_id: RequestId | None = None
    turn: int | None = None
    n: int | None = None
    priority: int | None = None

    def most_response_bytes(self) -> int:
        """Return the limit in bytes of its response, by its output tokens; a longer response is an error."""
        expected = BYTES_PER_TOKEN * self.max_tokens * (self.n or 1) + BYTES_PER_REQUEST_BYTE * len(self.body)
        if b"logprobs" in self.body:
            expected *= LOGPROBS_TIMES
        return min(LEAST_RESPONSE_BYTES + expected, MOST_RESPONSE_BYTES)


def request_headers(
    request_id: str, session_id: str | None, session_names: Sequence[str] = (SESSION_HEADER,)
) -> Headers:
    """Headers of every request; ids must be printable ASCII. ``session_names``: headers that carry the session id."""
    headers = [
        (b"Content-Type", b"application/json"),
        (b"Accept", b"text/event-stream, application/json"),
        (b"X-Request-Id", request_id.encode("ascii")),
    ]
    if session_id is not None:
        headers += [(name.encode("ascii"), session_id.encode("ascii")) for name in session_names]
    return tuple(headers)


class RequestWriter:
    """Serialises requests to one server. ``access``: headers of all requests, outside any digest."""

    def __init__(self, origin: Origin, access: Headers = ()) -> None:
        self._origin = origin
        self._headers = access
        self._starts: dict[str, bytes] = {}

    def write(self, request: PlannedRequest) -> bytes:
        start = self._starts.get(request.path)
        if start is None:
            line = b"POST %b HTTP/1.1" % self._origin.target(request.path)
            headers = map(b": ".join, ((b"Host", self._origin.host_header), *self._headers))
            start = self._starts[request.path] = b"\r\n".join((line, *headers))
        length = b"Content-Length: %d" % len(request.body)
        return b"\r\n".join((start, length, *map(b": ".join, request.headers), b"", request.body))


def origin_of(url: str) -> Origin:
    try:
        return parse_url(url).without_endpoint()
    except WireError as error:
        raise InputError(f"--url: {error}") from None
