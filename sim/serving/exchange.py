"""HTTP exchanges: a request and its response; each chunk is written to the transport with one system call."""

from collections.abc import Callable, Sequence
from http import HTTPStatus

from wire.head import Header, RequestHead, serialise_head
from wire.server import ClientConnection

JSON_TYPE = (b"content-type", b"application/json")
MAX_BODY_BYTES = 64 * 1024 * 1024
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class HttpRequest:
    """Complete HTTP request."""

    __slots__ = ("body", "head")

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.body = b""

    @property
    def path(self) -> str:
        return self.head.target.partition(b"?")[0].decode("latin-1")

    def header(self, name: bytes) -> str | None:
        values = self.head.values(name)
        return values[0].decode("latin-1") if values else None


class Exchange:
    """Response to a request, a ``wire.server.RequestHandler``. Writes after a disconnect are dropped."""

    __slots__ = (
        *("_chunked", "_connection", "_handle", "_keep_alive", "_parts", "_paused", "_request", "_size"),
        *("on_gone", "on_writable", "open"),
    )

    def __init__(self, head: RequestHead, connection: ClientConnection, handle: "Handler") -> None:
        self._connection, self._handle = connection, handle
        self._request = HttpRequest(head)
        self._parts: list[bytes] = []
        self._size = 0
        self._keep_alive = head.keep_alive
        self._chunked = head.version == "1.1"
        self._paused = False
        self.open = True
        self.on_gone: Callable[[], None] | None = None
        """Called if the client leaves before the end."""
        self.on_writable: Callable[[], None] | None = None
        """Called when a slow client has read everything."""
        if (self._request.header(b"expect") or "").lower() == "100-continue":
            connection.write_informational(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Called by the connection.

    def request_body(self, raw: bytes, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_BODY_BYTES:
            self.open = False
            self._connection.refuse(413, "the request's body is too large")
        else:
            self._parts.append(data)

    def request_end(self) -> None:
        self._request.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._handle(self._request, self)

    def client_gone(self) -> None:
        if self.open:
            self.open = False
            if self.on_gone is not None:
                self.on_gone()

    def pause_response(self) -> None:
        self._paused = True

    def resume_response(self) -> None:
        self._paused = False
        if self.open and self.on_writable is not None:
            self.on_writable()

    # Called by the reply.

    @property
    def writable(self) -> bool:
        return self.open and not self._paused

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        framing = (b"transfer-encoding", b"chunked") if self._chunked else (b"connection", b"close")
        self._write(_head_bytes(status, [*headers, framing]))

    def write(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self, data: bytes = b"") -> None:
        if self._chunked:
            self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")
        else:
            self._write(data)
        self._finish(keep_alive=self._keep_alive and self._chunked)

    def respond(self, status: int, headers: Sequence[Header], body: bytes, *, is_head: bool = False) -> None:
        """Write a complete response; ``is_head``: without body."""
        framing = [(b"content-length", b"%d" % len(body))]
        if not self._keep_alive:
            framing.append((b"connection", b"close"))
        self._write(_head_bytes(status, [*headers, *framing]) + (b"" if is_head else body))
        self._finish(keep_alive=self._keep_alive)

    def cut(self) -> None:
        """Close the connection before the end of the response; written bytes are delivered."""
        self._finish(keep_alive=False)

    def _write(self, data: bytes) -> None:
        if self.open:
            self._connection.write(data)

    def _finish(self, *, keep_alive: bool) -> None:
        if self.open:
            self.open = False
            self._connection.finish(keep_alive=keep_alive)


Handler = Callable[[HttpRequest, Exchange], None]


def _head_bytes(status: int, headers: Sequence[Header]) -> bytes:
    return serialise_head(b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b"Unknown")), headers)
