"""Relay of a request to its upstream and of the response to the client, with a capture of both for the recorder.

All code here runs inside a socket's read callback. It writes the raw bytes of each read, chunk framing included, so
tokens reach the client with the upstream's chunk boundaries and timing. Nothing is retried: if an upstream is lost
after the request was sent, the client's response is cut short, as without the tap.
The arrival time of each response read is captured (``response_body``: ``at_ns``). The recorder decides later, by
``wire.completion``, in which read the first token (TTFT) and each further token arrived.
"""

import asyncio
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from tap.ipc.messages import RECORDED_REQUEST_HEADERS
from tap.proxy.capture_buffer import CaptureBudget, CaptureBuffer, capture_limit_bytes, recorded_endpoint
from tap.proxy.recorderlink import RecorderLink
from tap.proxy.routing import prefix_wait_bytes
from tap.proxy.upstreams import SERVER_ERROR, Upstream, Upstreams
from tracefile.records.schema import Status
from wire.client.connection import ResponseHead, ServerConnection
from wire.client.pool import ConnectError
from wire.errors import LossKind
from wire.head import Header, connection_options, end_to_end, serialise_head
from wire.server import ClientConnection, RequestHead


@dataclass(eq=False)
class Relays:
    """State that all relays of a worker share: upstreams, recorder link and memory budget of the captures."""

    upstreams: Upstreams
    link: RecorderLink
    budget: CaptureBudget
    max_body_bytes: int
    keep_headers: Sequence[str] = ()
    in_flight = relayed = 0
    bytes_in = bytes_out = 0
    """Bytes of request and response bodies. Bodies of recorded requests are added when the request ends."""
    ending = False
    """True: the drain time is over, and the tap cuts the remaining requests."""

    def __post_init__(self) -> None:
        self._recorded_headers = RECORDED_REQUEST_HEADERS.union(name.encode() for name in self.keep_headers)

    def new_relay(self, head: RequestHead, client: ClientConnection) -> "Relay":
        relay = self._kind()(self, head, client)
        if head.method == b"CONNECT" or wants_websocket(head):
            client.refuse(501, "tap relays HTTP requests only, no WebSocket or tunnel")
        elif head.method == b"TRACE":  # the response would echo headers that the tap adds
            client.refuse(405, "tap does not relay TRACE")
        else:
            relay.begin()
        return relay

    def _kind(self) -> "type[Relay]":
        return RoutedRelay if self.upstreams.reads_prompt else Relay

    def new_capture(self, head: RequestHead, base_path: bytes) -> CaptureBuffer | None:
        if head.method != b"POST":
            return None
        endpoint = recorded_endpoint(base_path + head.target)
        if endpoint is None:
            self.link.count_unrecorded()
            return None
        self.in_flight += 1
        return CaptureBuffer(
            self.budget,
            capture_limit_bytes(endpoint, self.max_body_bytes),
            endpoint=endpoint,
            arrival_ns=head.at_ns,
            concurrency=self.link.begin(),
            headers=head.headers,
            names=head.names,
            recorded=self._recorded_headers,
        )


class Relay:
    """Handler of a request on the client connection and sink of its response on the upstream connection."""

    __slots__ = (
        "_assignment",
        "_before_body",
        "_capture",
        "_client",
        "_connecting",
        "_dechunk",
        "_ended",
        "_head",
        "_keep_client",
        "_relays",
        "_request_complete",
        "_response_paused",
        "_response_start",
        "_self_delimited",
        "_server",
        "_unsent",
    )

    def __init__(self, relays: Relays, head: RequestHead, client: ClientConnection) -> None:
        self._relays, self._head, self._client = relays, head, client
        relays.relayed += 1
        upstreams = relays.upstreams
        self._assignment = upstreams.provisional() if upstreams.reads_prompt else upstreams.pick(head)
        self._server: ServerConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._capture: CaptureBuffer | None = None
        self._unsent: list[bytes] = []
        """Request reads that wait for a connection, or for the rest of the same read to be written with it."""
        self._response_start = b""
        """Response head that waits to be written together with the body bytes of the same read."""
        self._before_body: bool | None = None
        """True: the response head has arrived, but no body byte. None: no head has arrived."""
        self._request_complete = False
        self._response_paused = False
        self._dechunk = False
        self._self_delimited = True
        """True: the framing lets the client detect a response that was cut short."""
        self._keep_client = True
        self._ended = False

    def begin(self) -> None:
        """Send the head, and the body bytes of the same read, to the upstream in one write."""
        self._capture = self._relays.new_capture(self._head, self._assignment.upstream.base_path)
        if not self._client.has_more_data:
            self._send_request()

    def _send_request(self) -> None:
        assignment = self._assignment
        assignment.begin()
        server = assignment.upstream.pool.pop_idle()
        if server is not None:
            self._start(server)
        else:
            self._client.pause_reading()
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        unreachable: list[Upstream] = []
        while True:
            try:
                server = await self._assignment.upstream.connect()
                break
            except ConnectError as error:
                unreachable.append(self._assignment.upstream)
                following = self._relays.upstreams.pick_next(self._head, self._assignment, unreachable)
                if following is None:
                    self._connecting = None
                    self._end("error", error.kind)
                    self._client.refuse(502, f"tap cannot reach the upstream ({error.kind})")
                    return
            self._assignment.end()
            self._assignment = following
            following.begin()
        self._connecting = None
        self._start(server)

    def _start(self, server: ServerConnection) -> None:
        self._server, upstream = server, self._assignment.upstream
        self._client.resume_reading()
        if self._response_paused:
            server.pause_reading()
        body, self._unsent = self._unsent, []
        server.start(upstream_head(self._head, upstream), self, body=body, head_only=self._head.method == b"HEAD")
        if self._capture is not None:
            self._capture.sent_to(upstream.name)

    # The request, from the client.

    def request_body(self, raw: bytes, data: bytes) -> None:
        if self._server is not None:
            self._server.write(raw)
        elif not self._ended:
            self._unsent.append(raw)
            if self._connecting is None:
                self._send_request()
        if self._capture is not None:
            self._capture.request_body(data)
        else:
            self._relays.bytes_in += len(data)

    def request_end(self) -> None:
        self._request_complete = True

    def client_gone(self) -> None:
        """Abort the upstream request at once, so that the engine stops generating tokens for a client that left."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._server is not None:
            self._server.abort()
        self._end("client_abort", "tap_ended" if self._relays.ending else None)

    def pause_response(self) -> None:
        """Stop reading from the upstream while the client is slow, so that memory stays bounded."""
        self._response_paused = True
        if self._server is not None:
            self._server.pause_reading()

    def resume_response(self) -> None:
        self._response_paused = False
        if self._server is not None:
            self._server.resume_reading()

    # The response, from the upstream.

    def response_head(self, head: ResponseHead) -> None:
        if head.informational:
            if self._head.version == "1.1":
                self._client.write_informational(client_head(head, end_to_end(head.headers, head.names)))
            return
        self._begin_response(head)
        request = self._head
        if head.passes and request.version == "1.1" and request.keep_alive and not self._client.closing:
            start = head.raw
        else:
            start = client_head(head, self._response_headers(head))
        if self._server is not None and self._server.has_more_data:
            self._response_start = start
        else:
            self._client.write(start)

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Relay one read; ``at_ns`` is the arrival time of its tokens, captured for TTFT and ITL."""
        if self._before_body:
            self._begin_body()
            self._flush_response_start(data if self._dechunk else raw)
        else:
            self._client.write(data if self._dechunk else raw)
        capture = self._capture
        if capture is not None:
            capture.response_body(at_ns, data)
        else:
            self._relays.bytes_out += len(data)

    def response_end(self) -> None:
        self._flush_response_start()
        server, self._server = self._server, None
        if server is not None and not self._request_complete:
            server.abort()  # the server would parse the remaining body bytes as the next request
        self._end("ok", "bad_response" if server is not None and server.malformed else None)
        self._client.finish(keep_alive=self._keep_client)

    def response_lost(self, kind: LossKind) -> None:
        """End the client's response without a clean end: the upstream connection was lost."""
        self._flush_response_start()
        self._server = None
        if self._before_body is None:
            self._assignment.upstream.failed("no response")
        self._end("upstream_abort" if kind == "upstream_closed" else "error", kind)
        if self._self_delimited:
            self._client.finish(keep_alive=False)
        else:
            reset(self._client)

    def pause_request(self) -> None:
        self._client.pause_reading()

    def resume_request(self) -> None:
        self._client.resume_reading()

    def _begin_response(self, head: ResponseHead) -> None:
        """Report the status to the upstream's health check and capture the head."""
        upstream = self._assignment.upstream
        if head.status >= SERVER_ERROR or upstream.ejection.troubled:
            upstream.responded(head.status)
        if self._capture is not None:
            self._capture.response_head(head.status, head.headers, head.names)
        self._before_body = True

    def _begin_body(self) -> None:
        """Count the prefill as done. Routing takes the first body byte for the first token; records do not."""
        self._before_body = False
        self._assignment.first_token()

    def _flush_response_start(self, body: bytes = b"") -> None:
        start, self._response_start = self._response_start, b""
        if start or body:
            self._client.write(start + body)

    def _response_headers(self, head: ResponseHead) -> list[Header]:
        headers = end_to_end(head.headers, head.names)
        old_client = self._head.version != "1.1"
        if old_client and b"transfer-encoding" in head.names:
            self._dechunk = True
            headers = [header for header in headers if header[0].lower() != b"transfer-encoding"]
        closes = (head.until_close and self._head.method != b"HEAD") or self._dechunk
        self._self_delimited = not closes
        self._keep_client = not closes
        if closes or self._client.closing or not self._head.keep_alive:
            headers.append((b"Connection", b"close"))
        elif old_client:
            headers.append((b"Connection", b"keep-alive"))
        return headers

    def _end(self, outcome: Status, error_kind: str | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._unsent.clear()
        if self._capture is not None:
            capture, relays = self._capture, self._relays
            self._capture = None
            relays.in_flight -= 1
            relays.bytes_in += capture.request_bytes
            relays.bytes_out += capture.response_bytes
            relays.link.submit(capture, perf_counter_ns(), outcome, error_kind)
        self._assignment.end()  # last: an exception of a routing policy must not lose the record


WAIT_S = 0.05
"""Longest wait for the prompt prefix; a slower upload is routed by the bytes that have arrived."""


class RoutedRelay(Relay):
    """Relay whose upstream is chosen by the prompt prefix (prefix-aware routing); the bytes pass unchanged."""

    __slots__ = ("_data", "_missing_bytes", "_timer")

    def __init__(self, relays: Relays, head: RequestHead, client: ClientConnection) -> None:
        super().__init__(relays, head, client)
        self._data: list[bytes] = []
        """Body reads before the routing decision, without chunk framing."""
        self._missing_bytes = prefix_wait_bytes(head)
        """Body bytes that are missing for the routing decision. 0: the upstream is chosen."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._capture = self._relays.new_capture(self._head, self._assignment.upstream.base_path)
        if not self._missing_bytes:
            self._choose()
            if not self._client.has_more_data:
                self._send_request()
        elif not self._client.has_more_data:
            self._wait()

    def request_body(self, raw: bytes, data: bytes) -> None:
        if not self._missing_bytes or self._ended:
            super().request_body(raw, data)
            return
        self._unsent.append(raw)
        self._data.append(data)
        if self._capture is not None:
            self._capture.request_body(data)
        else:
            self._relays.bytes_in += len(data)
        self._missing_bytes = max(0, self._missing_bytes - len(data))
        if not self._missing_bytes:
            self._choose_and_send()
        else:
            self._wait()

    def request_end(self) -> None:
        super().request_end()
        if self._missing_bytes:
            self._choose_and_send()

    def client_gone(self) -> None:
        self._stop_waiting()
        super().client_gone()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._choose_and_send)

    def _stop_waiting(self) -> None:
        self._missing_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _choose(self) -> None:
        self._assignment = self._relays.upstreams.pick_by_prompt(self._head, self._data)
        self._data.clear()

    def _choose_and_send(self) -> None:
        self._stop_waiting()
        if not self._ended:
            self._choose()
            self._send_request()


def upstream_head(head: RequestHead, upstream: Upstream) -> bytes:
    """Return the request head for the upstream: with its Host, without hop-by-hop headers, otherwise unchanged."""
    headers, host = head.headers.copy(), (b"Host", upstream.origin.host_header)
    if b"host" in head.names:
        at = head.names.index(b"host")
        headers[at] = (headers[at][0], host[1])
    headers = end_to_end(headers, head.names)
    if b"host" not in head.names:
        headers.insert(0, host)
    target = head.target if head.target.startswith(b"/") else origin_form(head.target)
    if target != b"*":
        target = upstream.base_path + target
    return serialise_head(b"%b %b HTTP/1.1" % (head.method, target), headers)


def client_head(head: ResponseHead, headers: list[Header]) -> bytes:
    return serialise_head(b"HTTP/1.1 %d %b" % (head.status, head.reason), headers)


def origin_form(target: bytes) -> bytes:
    """Return path and query of a target, without the scheme and host of an absolute target."""
    if target.startswith(b"/") or b"://" not in target:
        return target
    _, _, authority_and_path = target.partition(b"://")
    path = authority_and_path[len(re.split(rb"[/?]", authority_and_path, maxsplit=1)[0]) :]
    return path if path.startswith(b"/") else b"/" + path


def reset(client: ClientConnection) -> None:
    """Close with TCP RST: without a length, an orderly close would look like a complete response."""
    if client.transport is not None:
        sock = client.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.abort()


def wants_websocket(head: RequestHead) -> bool:
    """Return whether the request is a WebSocket handshake. Other upgrades are optional, and are dropped."""
    if b"upgrade" not in head.names or b"upgrade" not in connection_options(head.headers):
        return False
    return any(b"websocket" in value.lower() for value in head.values(b"upgrade"))
