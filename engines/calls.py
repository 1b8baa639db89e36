"""HTTP calls to an engine off the data plane, with a limit on bytes and on total time.

An engine may respond without end, or with a byte a second. A timeout per read bounds neither, so a call has a deadline
from connecting to the last byte, and a body is read up to its limit. Connections and TLS: ``wire.client.pool``.
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
"""Limit of ``/metrics``: vLLM sends some 100 KB an engine."""
MAX_IDS_BYTES = 16 << 20
"""Limit of a response with token ids: two million tokens, with their commas."""
PROBE_S = 2.0
BAD_REQUEST = 400
"""Status of nginx and others for plain HTTP on a TLS port."""
NO_CERTIFICATE = b"SSL certificate"
"""Text of nginx's error page for a missing or wrong client certificate: its handshake accepts any."""
CERTIFICATE_REFUSAL = "HTTP 400, client certificate missing or refused; expected --cert and --key"
TLS_PORT = "plain HTTP on a TLS port; expected https:// instead of http://"
LOST = {
    "upstream_closed": "the server closed the connection; expected a response",
    "bad_response": "no HTTP response; expected a server of HTTP/1.1",
    "tls_failed": "TLS: the server refused after the handshake; expected a valid --cert and --key",
}


class CallError(Exception):
    """The call has no usable response; the message has the failure and the expectation."""


class LateError(CallError):
    """The response was not complete before the deadline."""


def max_page_bytes(path: str) -> int:
    """Return the byte limit of a page."""
    return MAX_METRICS_BYTES if path == "/metrics" else MAX_BYTES


class _Reply:
    """Sink of one response."""

    def __init__(self, max_bytes: int) -> None:
        self.result: asyncio.Future[Response | LossKind] = asyncio.get_running_loop().create_future()
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
        if not self.result.done():
            self.result.set_result(Response(self._status, bytes(self._body), date=self._date))

    def response_lost(self, kind: LossKind) -> None:
        if not self.result.done():
            self.result.set_result(kind)

    def pause_request(self) -> None: ...

    def resume_request(self) -> None: ...

    def _fail(self, text: str) -> None:
        self._body.clear()
        if not self.result.done():
            self.result.set_exception(CallError(text))


class Calls:
    """Calls to one engine over keep-alive connections."""

    def __init__(self, origin: Origin, access: Access = OPEN) -> None:
        self._origin, self._access = origin, access
        self._pool = ConnectionPool(origin, tls=access.tls)

    async def call(self, path: str, *, body: bytes | None = None, timeout_s: float, max_bytes: int) -> Response:
        """Return the response to a GET, or with ``body`` to a POST of JSON; raises CallError."""
        request = self._request(path, body)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._exchange(self._pool.pop_idle(), request, max_bytes)
        except TimeoutError:
            raise LateError(f"no complete response within {timeout_s:g} s; expected a faster one") from None
        except ConnectError as error:
            kind = LateError if error.kind == "connect_timeout" else CallError
            raise kind(error.reason) from None
        # nginx, Apache and Go mention HTTPS in their 400 to plain HTTP; other 400 responses need no TLS probe.
        maybe_tls = not isinstance(response, Response) or (
            response.status == BAD_REQUEST and b"HTTPS" in response.content
        )
        if maybe_tls and self._origin.scheme == "http" and await speaks_tls(self._origin, PROBE_S):
            raise CallError(TLS_PORT)
        if not isinstance(response, Response):
            raise CallError(LOST.get(response, response.replace("_", " ")))
        return response

    def close(self) -> None:
        """Drop every connection."""
        self._pool.close()

    def _request(self, path: str, body: bytes | None) -> bytes:
        # A compressed body could exceed the limit when decoded: only identity is accepted.
        headers = [(b"Host", self._origin.host_header), (b"Accept", b"*/*"), (b"Accept-Encoding", b"identity")]
        if body is not None:
            headers += [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
        method = b"GET" if body is None else b"POST"
        line = b"%b %b HTTP/1.1" % (method, self._origin.target(path))
        return serialise_head(line, (*headers, *self._access.headers)) + (body or b"")

    async def _exchange(self, idle: ServerConnection | None, request: bytes, max_bytes: int) -> Response | LossKind:
        """Send the request; retry on a new connection if the server had closed the idle connection."""
        connection = idle or await self._pool.connect()
        reply = _Reply(max_bytes)
        try:
            connection.start(request, reply)
            response = await reply.result
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
    """Calls to one engine without a running event loop, over keep-alive connections; a context manager."""

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
        return self._run(path, None, max_page_bytes(path))

    def post(self, path: str, body: bytes) -> Response:
        """Return the response to a POST of JSON; raises CallError."""
        return self._run(path, body, MAX_IDS_BYTES)

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._closed())

    async def _closed(self) -> None:
        self._calls.close()
        await asyncio.sleep(0)  # lets the transports close

    def _run(self, path: str, body: bytes | None, max_bytes: int) -> Response:
        return self._runner.run(self._calls.call(path, body=body, timeout_s=self._timeout_s, max_bytes=max_bytes))
