"""Relay of ``--inject``: requests usage or token ids from the engine and removes them from the response.

Only streams are injected: a response in one JSON text has its usage, and its Content-Length is sent before the body.
The relay buffers the request to its last byte, since the deciding JSON members can be anywhere in the body; the limit
of the capture bounds the buffer. The response stream passes read by read. The capture holds every byte of the engine.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from engines.detection import DIALECTS
from engines.dialect import DialectName
from tap.ipc.messages import Endpoint
from tap.ipc.settings import Injection
from tap.proxy.capture_buffer import CaptureBudget, recorded_endpoint
from tap.proxy.recorderlink import RecorderLink
from tap.proxy.relay import Relay, Relays, RoutedRelay, client_head, wants_websocket
from tap.proxy.responsefilter import ResponseFilter
from tap.proxy.upstreams import Upstreams
from tracefile.records.decoding import NOT_JSON
from wire.client.connection import ResponseHead, ServerConnection
from wire.head import Header, RequestHead, header_values
from wire.server import ClientConnection

CHAT = "/v1/chat/completions"
INJECTABLE = frozenset({"/v1/completions", CHAT})
_ABSENT = msgspec.Raw()


class Request(msgspec.Struct):
    """Raw JSON members that decide about injection: prompt, stream, usage and token ids."""

    prompt: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    stream: msgspec.Raw = _ABSENT
    stream_options: msgspec.Raw = _ABSENT
    return_token_ids: msgspec.Raw = _ABSENT
    echo: msgspec.Raw = _ABSENT
    parallel_tool_calls: msgspec.Raw = _ABSENT

    def has_prompt(self, endpoint: Endpoint) -> bool:
        prompts = (self.messages,) if endpoint == CHAT else (self.prompt, self.prompt_embeds)
        return any(prompt is not _ABSENT for prompt in prompts)


_decode = msgspec.json.Decoder(Request).decode


def inject(
    body: bytes, endpoint: Endpoint, dialect: DialectName, requested: frozenset[Injection]
) -> tuple[bytes, frozenset[Injection]]:
    """Return the body with the injected members, and the injections; members of the client are never overridden.

    Members are appended to the object, so that positions in an engine's error message hold for the client's body. A
    body that the engine will refuse is returned unchanged: the error would quote the injected members.
    Raises one of ``NOT_JSON`` for a body that is not a JSON object.
    """
    request = _decode(body)
    members: dict[Injection, bytes] = {}
    if bytes(request.stream) == b"true" and request.has_prompt(endpoint):
        supported = requested & DIALECTS[dialect].injectable
        if "token-ids" in supported and _accepts_token_ids(request, endpoint):
            members["token-ids"] = b',"return_token_ids":true'
        if "usage" in supported and request.stream_options is _ABSENT:
            members["usage"] = b',"stream_options":{"include_usage":true}'
    end = body.rindex(b"}")
    return b"".join((body[:end], *members.values(), body[end:])), frozenset(members)


def _accepts_token_ids(request: Request, endpoint: Endpoint) -> bool:
    if bytes(request.echo) not in (b"", b"false", b"null"):
        return False  # vLLM omits the text of the echoed prompt when it returns token ids
    if endpoint == CHAT and bytes(request.parallel_tool_calls) == b"false":
        return False  # vLLM empties the events of further calls, which then look like events with token ids only
    return request.return_token_ids is _ABSENT


OK = 200
SIGNED = frozenset(
    {b"content-md5", b"digest", b"content-digest", b"repr-digest", b"x-amz-content-sha256", b"signature"}
)
"""Headers with a signature or digest of the body, which must then stay unchanged."""


@dataclass(eq=False)
class InjectingRelays(Relays):
    """Relays that inject usage or token ids into requests, as far as the upstream's dialect supports them."""

    requested: frozenset[Injection] = field(kw_only=True)
    skipped: Counter[str] = field(init=False, default_factory=Counter)
    """Requests without injection, and responses that keep the injected fields, by reason."""

    def new_relay(self, head: RequestHead, client: ClientConnection) -> Relay:
        endpoint = recorded_endpoint(head.target) if head.method == b"POST" else None
        if endpoint not in INJECTABLE or wants_websocket(head) or not self._has_dialect:
            return super().new_relay(head, client)
        reason = self._skip_reason(head)
        if reason is not None:
            self.count_skipped(reason)
            return super().new_relay(head, client)
        relay = InjectingRelay(self, head, client, endpoint)
        relay.begin()
        return relay

    @property
    def _has_dialect(self) -> bool:
        return any(upstream.dialect is not None for upstream in self.upstreams.all)

    def count_skipped(self, reason: str) -> None:
        self.skipped[reason] += 1
        self.link.count_not_injected()

    def _skip_reason(self, head: RequestHead) -> str | None:
        names = head.names
        lengths = head.values(b"content-length")
        if b"content-encoding" in names:
            return "request_encoded"
        if b"expect" in names:
            return "request_waits_for_continue"  # the engine sends 100 Continue only after the head
        if not SIGNED.isdisjoint(names):
            return "request_signed"
        if lengths and int(lengths[0]) > self.max_body_bytes:
            return "request_larger_than_the_copy"
        return None


def new_relays(
    upstreams: Upstreams,
    link: RecorderLink,
    budget: CaptureBudget,
    max_body_bytes: int,
    keep_headers: Sequence[str] = (),
    *,
    requested: Collection[Injection],
) -> Relays:
    if not requested:
        return Relays(upstreams, link, budget, max_body_bytes, keep_headers)
    return InjectingRelays(upstreams, link, budget, max_body_bytes, keep_headers, requested=frozenset(requested))


class InjectingRelay(RoutedRelay):
    """Relay that buffers the complete request, injects into it and filters the response stream."""

    __slots__ = ("_body", "_endpoint", "_filter", "_reframes")

    _relays: InjectingRelays

    def __init__(
        self, relays: InjectingRelays, head: RequestHead, client: ClientConnection, endpoint: Endpoint
    ) -> None:
        super().__init__(relays, head, client)
        self._endpoint = endpoint
        self._missing_bytes = relays.max_body_bytes + 1
        self._body: bytes | None = None
        """Complete request body, until the upstream is connected."""
        self._filter: ResponseFilter | None = None
        """None: the response passes unchanged."""
        self._reframes = False
        """True: the filtered body is chunked again, with one chunk for each read that is not empty after the filter."""

    def begin(self) -> None:
        self._capture = self._relays.new_capture(self._head, self._assignment.upstream.base_path)

    # The request, from the client.

    def request_body(self, raw: bytes, data: bytes) -> None:
        was_waiting = self._missing_bytes > 0
        super().request_body(raw, data)
        if was_waiting and not self._missing_bytes:
            self._relays.count_skipped("request_larger_than_the_copy")
        elif was_waiting and self._capture is not None and self._capture.dropped is not None:
            self._relays.count_skipped("copies_full")
            self._choose_and_send()

    def request_end(self) -> None:
        if self._missing_bytes:
            self._body = b"".join(self._data)
        super().request_end()

    def _wait(self) -> None:
        """Set no timer: injection needs the complete request."""

    def _choose(self) -> None:
        if self._relays.upstreams.reads_prompt:
            super()._choose()

    def _start(self, server: ServerConnection) -> None:
        """Inject by the dialect of the connected upstream: upstreams may run different engines."""
        body, self._body = self._body, None
        dialect = self._assignment.upstream.dialect
        if body is not None and dialect is not None:
            try:
                injected_body, added = inject(body, self._endpoint, dialect, self._relays.requested)
            except NOT_JSON:
                added = frozenset()
                self._relays.count_skipped("request_not_json")
            if added:
                self._filter = ResponseFilter(added, dialect)
                if self._capture is not None:
                    self._capture.add_injected(sorted(added))
                self._head, self._unsent = with_length(self._head, len(injected_body)), [injected_body]
        super()._start(server)

    # The response, from the upstream.

    def response_head(self, head: ResponseHead) -> None:
        if self._filter is not None and not head.informational:
            if head.status != OK or not is_event_stream(head):
                self._filter = None
            elif is_encoded(head):
                self._relays.count_skipped("response_encoded")
                self._filter = None
            else:
                head = without_length(head)
                self._reframes = bool(header_values(head.headers, b"transfer-encoding"))
        super().response_head(head)
        self._reframes = self._reframes and not self._dechunk

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Write the filtered read at once, so that no token is delayed; capture the unfiltered read."""
        if self._filter is None:
            super().response_body(at_ns, raw, data)
            return
        if self._before_body:
            self._begin_body()
        self._write_body(self._filter.feed(data))
        self._flush_response_start()  # if the filter removed all bytes, the head is written alone
        if self._capture is not None:
            self._capture.response_body(at_ns, data)

    def response_end(self) -> None:
        if self._filter is not None:
            self._write_body(self._filter.finish())
            if self._reframes:
                self._flush_response_start(b"0\r\n\r\n")
        super().response_end()

    def _write_body(self, data: bytes) -> None:
        if data:
            self._flush_response_start(b"%x\r\n%b\r\n" % (len(data), data) if self._reframes else data)


def with_length(head: RequestHead, length: int) -> RequestHead:
    """Return the request head for a body of this length and a response without content coding."""
    headers: list[Header] = []
    for name, value in head.headers:
        lower = name.lower()
        if lower == b"accept-encoding":
            headers.append((name, b"identity"))
        elif lower not in (b"content-length", b"transfer-encoding", b"trailer"):
            headers.append((name, value))
    headers.append((b"Content-Length", b"%d" % length))
    return msgspec.structs.replace(head, headers=headers, names=[name.lower() for name, _ in headers])


def without_length(head: ResponseHead) -> ResponseHead:
    """Return the response head with chunked framing: the filter changes the length."""
    if b"content-length" not in head.names:
        return head
    headers = [header for header in head.headers if header[0].lower() != b"content-length"]
    headers.append((b"Transfer-Encoding", b"chunked"))
    names = [name.lower() for name, _ in headers]
    return msgspec.structs.replace(head, headers=headers, names=names, raw=client_head(head, headers))


def is_event_stream(head: ResponseHead) -> bool:
    types = header_values(head.headers, b"content-type")
    return len(types) == 1 and types[0].partition(b";")[0].strip().lower() == b"text/event-stream"


def is_encoded(head: ResponseHead) -> bool:
    codings = header_values(head.headers, b"content-encoding")
    return any(coding.strip().lower() not in (b"", b"identity") for coding in codings)
