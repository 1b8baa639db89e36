"""HTTP calls to an engine off the data plane, each bounded in bytes and in its whole time.

An engine may respond without end, or a byte a second. A limit on each read bounds neither, so the time is one deadline
from connecting to the last byte, and a body is read no further than its limit. Connections and TLS are the
data plane's own (``wire.client.pool``).
"""

import asyncio

from engines.access import OPEN, REFUSED, Access
from engines.dialect import Response
from wire.client.connection import ResponseHead, ServerConnection
from wire.client.dialing import speaks_tls
from wire.client.pool import ConnectError, ConnectionPool
from wire.errors import LossKind
from wire.head import header_values, serialise_head
from wire.url import Origin, parse_url

MAX_BYTES = 1 << 20
MAX_METRICS_BYTES = 4 << 20
"""Bound for ``/metrics``: of vLLM some 100 KB an engine."""
MAX_IDS_BYTES = 16 << 20
"""Bound for token ids: two million, with their commas."""
PROBE_S = 2.0
BAD_REQUEST = 400
"""Status of nginx and others for plain HTTP on a port of TLS."""
NO_CERTIFICATE = b"SSL certificate"
"""In nginx's page for a client without a certificate, or with a wrong one: its handshake takes any."""
CERTIFICATE_REFUSAL = "HTTP 400, no certificate that the server takes; expected --cert and --key with one"
OTHER_SCHEME = "plain HTTP on a port that speaks TLS; expected https:// instead of http://"
LOST = {
    "upstream_closed": "the server closed the connection; expected a response",
    "bad_response": "no HTTP response; expected a server of HTTP/1.1",
    "tls_failed": "TLS: the server refused after the handshake; expected --cert and --key that it takes",
}


class CallError(Exception):
    """The call has no response that can be used; the text is the kind of failure and what was expected."""


class LateError(CallError):
    """The response was not whole in time."""


def most_bytes(path: str) -> int:
    """Return the most bytes to read of a page."""
    return MAX_METRICS_BYTES if path == "/metrics" else MAX_BYTES


class _Reply:
    """Sink of one response."""

    def __init__(self, max_bytes: int) -> None:
        self.whole: asyncio.Future[Response | LossKind] = asyncio.get_running_loop().create_future()
        self._max_bytes = max_bytes
        self._status = 0
        self.challenge = b""
        self._body = bytearray()

    def response_head(self, head: ResponseHead) -> None:
        self._status = head.status
        self.challenge = b", ".join(header_values(head.headers, b"www-authenticate"))
        self._date = b"".join(header_values(head.headers, b"date")).decode("latin-1")
        codings = header_values(head.headers, b"content-encoding")
        if not head.informational and any(coding.lower() != b"identity" for coding in codings):
            self._fail("encoded response; expected identity")

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._max_bytes:
            self._fail(f"response beyond {self._max_bytes} bytes; expected a shorter one")

    def response_end(self) -> None:
        if not self.whole.done():
            self.whole.set_result(Response(self._status, bytes(self._body), date=self._date))

    def response_lost(self, kind: LossKind) -> None:
        if not self.whole.done():
            self.whole.set_result(kind)

    def pause_request(self) -> None: ...

    def resume_request(self) -> None: ...

    def _fail(self, text: str) -> None:
        self._body.clear()
        if not self.whole.done():
            self.whole.set_exception(CallError(text))


class Calls:
    """Calls to one engine over kept connections."""

    def __init__(self, origin: Origin, access: Access = OPEN) -> None:
        self._origin, self._access = origin, access
        self._pool = ConnectionPool(origin, tls=access.tls)

    async def call(self, path: str, *, body: bytes | None = None, timeout_s: float, max_bytes: int) -> Response:
        """Return the response to a GET, or with ``body`` to a POST of JSON; raises CallError."""
        request = self._request(path, body)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._exchange(self._pool.take_idle(), request, max_bytes)
        except TimeoutError:
            raise LateError(f"no whole response within {timeout_s:g} s; expected one in time") from None
        except ConnectError as error:
            kind = LateError if error.kind == "connect_timeout" else CallError
            raise kind(error.reason) from None
        # nginx, Apache and Go name HTTPS in the 400 that they give plain HTTP; other engines' 400 is no reason to wait.
        unheard = not isinstance(response, Response) or (
            response.status == BAD_REQUEST and b"HTTPS" in response.content
        )
        if unheard and self._origin.scheme == "http" and await speaks_tls(self._origin, PROBE_S):
            raise CallError(OTHER_SCHEME)
        if not isinstance(response, Response):
            raise CallError(LOST.get(response, response.replace("_", " ")))
        return response

    def close(self) -> None:
        """Drop every connection."""
        self._pool.close()

    def _request(self, path: str, body: bytes | None) -> bytes:
        # A compressed body could be large again: identity is asked for, and another coding refused.
        headers = [(b"Host", self._origin.host_header), (b"Accept", b"*/*"), (b"Accept-Encoding", b"identity")]
        if body is not None:
            headers += [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
        method = b"GET" if body is None else b"POST"
        line = b"%b %b HTTP/1.1" % (method, self._origin.target(path))
        return serialise_head(line, (*headers, *self._access.headers)) + (body or b"")

    async def _exchange(self, kept: ServerConnection | None, request: bytes, max_bytes: int) -> Response | LossKind:
        """Send the request; a second time on a new connection if the server had closed the kept one."""
        connection = kept or await self._pool.connect()
        reply = _Reply(max_bytes)
        try:
            connection.start(request, reply)
            response = await reply.whole
        except BaseException:
            connection.abort()
            raise
        if connection.stale and response == "upstream_closed":
            return await self._exchange(None, request, max_bytes)
        if not isinstance(response, Response):
            return response
        if response.status in REFUSED:
            return response._replace(refusal=self._access.refusal(response.status, reply.challenge))
        wants_certificate = response.status == BAD_REQUEST and NO_CERTIFICATE in response.content
        return response._replace(refusal=CERTIFICATE_REFUSAL) if wants_certificate else response


class BlockingCalls:
    """Calls to one engine from a process without an event loop, over kept connections; a context manager."""

    def __init__(self, url: str, timeout_s: float, access: Access = OPEN) -> None:
        self._calls = Calls(parse_url(url), access)
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()

    def __enter__(self) -> "BlockingCalls":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str) -> Response:
        """Return the response to a GET; raises CallError."""
        return self._run(path, None, most_bytes(path))

    def post(self, path: str, body: bytes) -> Response:
        """Return the response to a POST of JSON; raises CallError."""
        return self._run(path, body, MAX_IDS_BYTES)

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._closed())

    async def _closed(self) -> None:
        self._calls.close()
        await asyncio.sleep(0)  # lets the transports see it

    def _run(self, path: str, body: bytes | None, max_bytes: int) -> Response:
        return self._runner.run(self._calls.call(path, body=body, timeout_s=self._timeout_s, max_bytes=max_bytes))
