"""Relay of a request: the client's bytes to the upstream, the upstream's to the client, and a side copy of both.

Everything here runs inside a socket's read callback. It writes the raw bytes of each read, chunk framing included, so
the client gets the upstream's chunk boundaries at the upstream's pace. Nothing is retried: an upstream lost after the
request was sent is a response cut short for the client, as without the tap.
"""

import asyncio
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from tap.ipc.messages import KEPT_REQUEST_HEADERS
from tap.proxy.capture_buffer import CaptureBuffer, CopyBudget, copied_bytes, recorded_endpoint
from tap.proxy.recorderlink import RecorderLink
from tap.proxy.routing import awaited_bytes
from tap.proxy.upstreams import SERVER_ERROR, Upstream, Upstreams
from tracefile.records.schema import Status
from wire.client.connection import ResponseHead, ServerConnection
from wire.client.pool import ConnectError
from wire.errors import LossKind
from wire.head import Header, connection_options, end_to_end, serialise_head
from wire.server import ClientConnection, RequestHead


@dataclass(eq=False)
class Relays:
    """All relays of a worker: their upstreams, and the copies of what is recorded."""

    upstreams: Upstreams
    link: RecorderLink
    budget: CopyBudget
    max_body_bytes: int
    keep_headers: Sequence[str] = ()
    in_flight = relayed = 0
    bytes_in = bytes_out = 0
    """Bytes of request and response bodies; those of recorded requests count at their end."""
    ending = False
    """The tap ends the requests that are left."""

    def __post_init__(self) -> None:
        self._kept_headers = KEPT_REQUEST_HEADERS.union(name.encode() for name in self.keep_headers)

    def new_relay(self, head: RequestHead, client: ClientConnection) -> "Relay":
        relay = self._kind()(self, head, client)
        if head.method == b"CONNECT" or wants_websocket(head):
            client.refuse(501, "tap relays HTTP requests only, no WebSocket or tunnel")
        elif head.method == b"TRACE":  # it would show the headers that the tap's side adds
            client.refuse(405, "tap does not relay TRACE")
        else:
            relay.begin()
        return relay

    def _kind(self) -> "type[Relay]":
        return RoutedRelay if self.upstreams.reads_prompt else Relay

    def new_copy(self, head: RequestHead, base_path: bytes) -> CaptureBuffer | None:
        if head.method != b"POST":
            return None
        endpoint = recorded_endpoint(base_path + head.target)
        if endpoint is None:
            self.link.count_unrecorded()
            return None
        self.in_flight += 1
        return CaptureBuffer(
            self.budget,
            copied_bytes(endpoint, self.max_body_bytes),
            endpoint=endpoint,
            arrival_ns=head.at_ns,
            concurrency=self.link.begin(),
            headers=head.headers,
            names=head.names,
            kept_headers=self._kept_headers,
        )


class Relay:
    """Handler of a client connection's request, and sink of the upstream connection's response."""

    __slots__ = (
        "_assignment",
        "_before_body",
        "_client",
        "_connecting",
        "_copy",
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
        self._copy: CaptureBuffer | None = None
        self._unsent: list[bytes] = []
        """Reads of the request before there is a connection, or to be written with the rest of the same read."""
        self._response_start = b""
        """Head of the response, while more of the same read follows."""
        self._before_body: bool | None = None
        """The response has its head, and nothing of its body yet. Null: no head yet."""
        self._request_complete = False
        self._response_paused = False
        self._dechunk = False
        self._self_delimited = True
        """The client can tell a cut response from a whole one."""
        self._keep_client = True
        self._ended = False

    def begin(self) -> None:
        """Send the head to the upstream with the part of the body that came with it, in one write."""
        self._copy = self._relays.new_copy(self._head, self._assignment.upstream.base_path)
        if not self._client.more_to_come:
            self._send_request()

    def _send_request(self) -> None:
        assignment = self._assignment
        assignment.begin()
        server = assignment.upstream.pool.take_idle()
        if server is not None:
            self._start(server)
        else:
            self._client.pause_reading()
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        passed: list[Upstream] = []
        while True:
            try:
                server = await self._assignment.upstream.reach()
                break
            except ConnectError as error:
                passed.append(self._assignment.upstream)
                following = self._relays.upstreams.pick_next(self._head, self._assignment, passed)
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
        if self._copy is not None:
            self._copy.sent_to(upstream.name)

    # The request, from the client.

    def request_body(self, raw: bytes, data: bytes) -> None:
        if self._server is not None:
            self._server.write(raw)
        elif not self._ended:
            self._unsent.append(raw)
            if self._connecting is None:
                self._send_request()
        if self._copy is not None:
            self._copy.request_body(data)
        else:
            self._relays.bytes_in += len(data)

    def request_end(self) -> None:
        self._request_complete = True

    def client_gone(self) -> None:
        """The client has left: abort the upstream's work at once."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._server is not None:
            self._server.abort()
        self._end("client_abort", "tap_ended" if self._relays.ending else None)

    def pause_response(self) -> None:
        """The client is slow: stop reading from the upstream, so that memory stays bounded."""
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
        if self._server is not None and self._server.more_to_come:
            self._response_start = start
        else:
            self._client.write(start)

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        if self._before_body:
            self._begin_body()
            self._flush_response_start(data if self._dechunk else raw)
        else:
            self._client.write(data if self._dechunk else raw)
        copy = self._copy
        if copy is not None:
            copy.response_body(at_ns, data)
        else:
            self._relays.bytes_out += len(data)

    def response_end(self) -> None:
        self._flush_response_start()
        server, self._server = self._server, None
        if server is not None and not self._request_complete:
            server.abort()  # the rest of this request would be read as the next one
        self._end("ok", "bad_response" if server is not None and server.malformed else None)
        self._client.finish(keep_alive=self._keep_client)

    def response_lost(self, kind: LossKind) -> None:
        """The upstream died: the client gets the bytes that came, and never a clean end."""
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
        """Take the head's status as the upstream's state, and copy the head."""
        upstream = self._assignment.upstream
        if head.status >= SERVER_ERROR or upstream.ejection.troubled:
            upstream.responded(head.status)
        if self._copy is not None:
            self._copy.response_head(head.status, head.headers, head.names)
        self._before_body = True

    def _begin_body(self) -> None:
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
        if self._copy is not None:
            copy, relays = self._copy, self._relays
            self._copy = None
            relays.in_flight -= 1
            relays.bytes_in += copy.request_bytes
            relays.bytes_out += copy.response_bytes
            relays.link.submit(copy, perf_counter_ns(), outcome, error_kind)
        self._assignment.end()  # last: a policy's fault must not cost the record


WAIT_S = 0.05
"""Longest wait for the start of a prompt; a slow upload is routed by what there is."""


class RoutedRelay(Relay):
    """Relay of a request whose upstream is chosen by the start of its prompt; the bytes pass unchanged."""

    __slots__ = ("_data", "_lacking_bytes", "_timer")

    def __init__(self, relays: Relays, head: RequestHead, client: ClientConnection) -> None:
        super().__init__(relays, head, client)
        self._data: list[bytes] = []
        """Reads of the body before the choice, without chunk framing."""
        self._lacking_bytes = awaited_bytes(head)
        """Bytes of the body until the choice. 0: it is made."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._copy = self._relays.new_copy(self._head, self._assignment.upstream.base_path)
        if not self._lacking_bytes:
            self._choose()
            if not self._client.more_to_come:
                self._send_request()
        elif not self._client.more_to_come:
            self._wait()

    def request_body(self, raw: bytes, data: bytes) -> None:
        if not self._lacking_bytes or self._ended:
            super().request_body(raw, data)
            return
        self._unsent.append(raw)
        self._data.append(data)
        if self._copy is not None:
            self._copy.request_body(data)
        else:
            self._relays.bytes_in += len(data)
        self._lacking_bytes = max(0, self._lacking_bytes - len(data))
        if not self._lacking_bytes:
            self._choose_and_send()
        else:
            self._wait()

    def request_end(self) -> None:
        super().request_end()
        if self._lacking_bytes:
            self._choose_and_send()

    def client_gone(self) -> None:
        self._stop_waiting()
        super().client_gone()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._choose_and_send)

    def _stop_waiting(self) -> None:
        self._lacking_bytes = 0
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
    """Return the request's head for the upstream: its own Host, no hop-by-hop headers, the rest unchanged."""
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
    """Return path and query of a target; of an absolute one (``GET http://host/path``) the part after its host."""
    if target.startswith(b"/") or b"://" not in target:
        return target
    _, _, rest = target.partition(b"://")
    path = rest[len(re.split(rb"[/?]", rest, maxsplit=1)[0]) :]
    return path if path.startswith(b"/") else b"/" + path


def reset(client: ClientConnection) -> None:
    """Cut a connection by a reset: an orderly end would look like the whole response where no length tells."""
    if client.transport is not None:
        sock = client.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.abort()


def wants_websocket(head: RequestHead) -> bool:
    """Return whether the request is a WebSocket handshake; other upgrades are offers, and not passed on."""
    if b"upgrade" not in head.names or b"upgrade" not in connection_options(head.headers):
        return False
    return any(b"websocket" in value.lower() for value in head.values(b"upgrade"))
