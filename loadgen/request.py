"""One request, ready to be written to a socket."""

from collections.abc import Sequence

import msgspec

from tracefile import RequestId, SessionId
from wire.url import Origin

Headers = tuple[tuple[bytes, bytes], ...]
SESSION_HEADER = "X-Session-ID"
"""What engines and routers mostly look for."""


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A serialised request and what its record will say of it besides what happened."""

    request_id: RequestId
    """As the trace has it; the header carries what the plan put there."""
    path: str
    headers: Headers
    body: bytes
    model: str
    max_tokens: int
    prompt_tokens: int | None = None
    """As planned; null: only the engine will know (chat). Usage overrules it."""
    stream: bool = True
    session_id: SessionId | None = None
    parent_id: RequestId | None = None
    turn: int | None = None
    n: int | None = None
    priority: int | None = None


def request_headers(
    request_id: str, session_id: str | None, session_names: Sequence[str] = (SESSION_HEADER,)
) -> Headers:
    """The headers every request of ours carries; ids must be printable ASCII without spaces.

    ``session_names``: the headers by which a router may know a session, to keep it on one engine.
    """
    headers = [
        (b"Content-Type", b"application/json"),
        (b"Accept", b"text/event-stream, application/json"),
        (b"X-Request-Id", request_id.encode("ascii")),
    ]
    if session_id is not None:
        headers += [(name.encode("ascii"), session_id.encode("ascii")) for name in session_names]
    return tuple(headers)


def serialise_request(request: PlannedRequest, origin: Origin) -> bytes:
    """All bytes of the request, head and body, as they go to a server."""
    head = [
        b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Length: %d"
        % (origin.target(request.path), origin.host_header, len(request.body))
    ]
    head += [b"%b: %b" % header for header in request.headers]
    return b"\r\n".join((*head, b"", request.body))
