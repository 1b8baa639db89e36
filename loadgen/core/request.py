"""Request that is ready to be written to a socket."""

from collections.abc import Sequence

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import RequestId, SessionId
from wire.errors import WireError
from wire.url import Origin, parse_url

Headers = tuple[tuple[bytes, bytes], ...]
SESSION_HEADER = "X-Session-ID"

MOST_RESPONSE_BYTES = 64 << 20
"""Bound for every response, which is kept until its end."""
LEAST_RESPONSE_BYTES = 1 << 20
"""Bytes that every response may have: errors, keep-alives, engines that know no ``max_tokens``."""
BYTES_PER_TOKEN = 1024
"""Bound for an output token: engines' events have 150 to 500 bytes."""
BYTES_PER_REQUEST_BYTE = 64
"""Bound for what a response repeats of its request: a prompt's ids, text and instructions, some of them thrice."""
LOGPROBS_TIMES = 8
"""Factor of both where log probabilities may be asked for: with 20 others, a token's event has 3 KB."""


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A serialised request and what its record will say of it besides what happened."""

    request_id: RequestId
    """As in the trace; the header carries the plan's id."""
    path: str
    headers: Headers
    body: bytes
    model: str
    max_tokens: int
    prompt_tokens: int | None = None
    """As planned; null: only the engine knows (chat). Usage overrules it."""
    stream: bool = True
    session_id: SessionId | None = None
    parent_id: RequestId | None = None
    turn: int | None = None
    n: int | None = None
    priority: int | None = None

    def most_response_bytes(self) -> int:
        """Return the bytes that its response cannot exceed, unless the server answers something else."""
        expected = BYTES_PER_TOKEN * self.max_tokens * (self.n or 1) + BYTES_PER_REQUEST_BYTE * len(self.body)
        if b"logprobs" in self.body:
            expected *= LOGPROBS_TIMES
        return min(LEAST_RESPONSE_BYTES + expected, MOST_RESPONSE_BYTES)


def request_headers(
    request_id: str, session_id: str | None, session_names: Sequence[str] = (SESSION_HEADER,)
) -> Headers:
    """Headers of every request; ids must be printable ASCII. ``session_names``: headers with the session id."""
    headers = [
        (b"Content-Type", b"application/json"),
        (b"Accept", b"text/event-stream, application/json"),
        (b"X-Request-Id", request_id.encode("ascii")),
    ]
    if session_id is not None:
        headers += [(name.encode("ascii"), session_id.encode("ascii")) for name in session_names]
    return tuple(headers)


class RequestWriter:
    """Serialises requests to one server; ``access``: headers that all have, and that no digest is made of."""

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
