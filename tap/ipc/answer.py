"""Response of the tap itself, sent when the request head is complete."""

from wire.head import Header, RequestHead, serialise_head
from wire.server import ClientConnection


class Answer:
    """Request handler that responds at once."""

    def __init__(
        self, head: RequestHead, client: ClientConnection, status: bytes, headers: list[Header], body: bytes
    ) -> None:
        keep_alive = head.method in (b"GET", b"HEAD") and head.keep_alive
        lines = [*headers, (b"Content-Length", b"%d" % len(body))]
        client.write(
            serialise_head(b"HTTP/1.1 " + status, lines if keep_alive else [*lines, (b"Connection", b"close")])
        )
        if head.method != b"HEAD":
            client.write(body)
        client.finish(keep_alive=keep_alive)

    def request_body(self, raw: bytes, data: bytes) -> None: ...

    def request_end(self) -> None: ...

    def client_gone(self) -> None: ...

    def pause_response(self) -> None: ...

    def resume_response(self) -> None: ...
