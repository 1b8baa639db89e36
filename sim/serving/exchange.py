"""One request of a connection and the response to it.

A response is written straight to the transport, a chunk a call, so that a token costs what its system call costs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.serving.connection import Connection

Header = tuple[bytes, bytes]

JSON_TYPE = (b"content-type", b"application/json")
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


@dataclass(slots=True)
class HttpRequest:
    """A request, complete when its handler gets it."""

    read_ns: int
    """When its first bytes were read (``perf_counter_ns``)."""
    target: bytes = b""
    method: bytes = b""
    headers: list[Header] = field(default_factory=list)
    """Names in lower case."""
    body: bytes = b""
    version: str = "1.1"
    keep_alive: bool = True

    @property
    def path(self) -> str:
        """The target's path, as sent."""
        return self.target.partition(b"?")[0].decode("latin-1")

    def header(self, name: bytes) -> str | None:
        """The first value of a header (lower-case name); None: not sent."""
        for known, value in self.headers:
            if known == name:
                return value.decode("latin-1")
        return None


class Exchange:
    """One request's response. What is written after the client has gone is dropped."""

    __slots__ = ("_chunked", "_connection", "_keep_alive", "on_gone", "on_writable", "open")

    def __init__(self, connection: "Connection", request: HttpRequest) -> None:
        self._connection = connection
        self._keep_alive = request.keep_alive
        self._chunked = request.version == "1.1"
        self.open = True
        """Whether the response has not ended and somebody still reads it."""
        self.on_gone: Callable[[], None] | None = None
        """Called if the client leaves before the end."""
        self.on_writable: Callable[[], None] | None = None
        """Called when a client that read slower than was written has caught up."""

    @property
    def writable(self) -> bool:
        """Whether the client keeps up: what is written now is not piled up."""
        return self.open and not self._connection.writing_paused

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        """Begin a response of unknown length."""
        framing = (b"transfer-encoding", b"chunked") if self._chunked else (b"connection", b"close")
        self._write(head_bytes(status, [*headers, framing]))

    def write(self, data: bytes) -> None:
        """Write one chunk."""
        if self.open:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def chunks(self, parts: Iterable[bytes]) -> list[bytes]:
        """Each part as the chunk that ``write`` would make of it, for ``offer``."""
        return [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] if self._chunked else list(parts)

    def offer(self, chunk: bytes) -> bool:
        """Write one of ``chunks``, unless the client has gone or reads slower than is written: False then."""
        connection = self._connection
        if not self.open or connection.writing_paused:
            return False
        connection.write(chunk)
        return True

    def end(self, data: bytes = b"") -> None:
        """Write what is left and end the response."""
        if self._chunked:
            self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")
        else:
            self._write(data)
        self._finish(keep_alive=self._keep_alive and self._chunked)

    def whole(self, status: int, headers: Sequence[Header], body: bytes, *, is_head: bool = False) -> None:
        """Write a response in one piece; ``is_head``: its body is only spoken of."""
        framing = [(b"content-length", b"%d" % len(body))]
        if not self._keep_alive:
            framing.append((b"connection", b"close"))
        self._write(head_bytes(status, [*headers, *framing]) + (b"" if is_head else body))
        self._finish(keep_alive=self._keep_alive)

    def cut(self) -> None:
        """Close the connection in the middle of the response, what was written being delivered."""
        self._finish(keep_alive=False)

    def reset(self) -> None:
        """Reset the connection: the client may lose even what was written."""
        if self.open:
            self.open = False
            self._connection.reset()

    def lose(self) -> None:
        """The connection is gone."""
        if self.open:
            self.open = False
            if self.on_gone is not None:
                self.on_gone()

    def _write(self, data: bytes) -> None:
        if self.open:
            self._connection.write(data)

    def _finish(self, *, keep_alive: bool) -> None:
        if self.open:
            self.open = False
            self._connection.finish(keep_alive=keep_alive)


def head_bytes(status: int, headers: Sequence[Header]) -> bytes:
    """A response's status line and headers."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"Unknown"))]
    lines += [b"%b: %b\r\n" % header for header in headers]
    return b"".join([*lines, b"\r\n"])
