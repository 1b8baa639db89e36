"""Relay that asks the engine for more than the client did, and removes the additions from the response.

Streams alone are asked for more: a response that is one JSON text has its usage, and its Content-Length precedes it.
The request waits for its last byte, since a member that decides can stand anywhere in it; the size of the recorder's
copy bounds the wait. The stream passes read by read. The recorder gets every byte as the engine sent it.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from engines.detection import DIALECTS
from engines.dialect import DialectName
from tap.ipc.messages import Endpoint
from tap.ipc.settings import Injection
from tap.proxy.capture_buffer import CopyBudget, recorded_endpoint
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
    """Members that decide what a request is asked for beside what it says, as they are written."""

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
    body: bytes, endpoint: Endpoint, dialect: DialectName, wanted: frozenset[Injection]
) -> tuple[bytes, frozenset[Injection]]:
    """Return the body with the wanted additions, and those made: no member that the client wrote itself.

    The client's bytes stay; additions stand at the end of the object, so a position in an engine's error message is one
    in the client's body. A body that the engine will refuse is returned unchanged: the error would quote the additions.
    Raises one of ``NOT_JSON`` for one that is no JSON object.
    """
    request = _decode(body)
    members: dict[Injection, bytes] = {}
    if bytes(request.stream) == b"true" and request.has_prompt(endpoint):
        askable = wanted & DIALECTS[dialect].injectable
        if "token-ids" in askable and _takes_ids(request, endpoint):
            members["token-ids"] = b',"return_token_ids":true'
        if "usage" in askable and request.stream_options is _ABSENT:
            members["usage"] = b',"stream_options":{"include_usage":true}'
    end = body.rindex(b"}")
    return b"".join((body[:end], *members.values(), body[end:])), frozenset(members)


def _takes_ids(request: Request, endpoint: Endpoint) -> bool:
    if bytes(request.echo) not in (b"", b"false", b"null"):
        return False  # vLLM leaves the echoed prompt's text out where it returns ids
    if endpoint == CHAT and bytes(request.parallel_tool_calls) == b"false":
        return False  # vLLM then empties events of further calls, which look like events that exist for ids alone
    return request.return_token_ids is _ABSENT


OK = 200
SIGNED = frozenset(
    {b"content-md5", b"digest", b"content-digest", b"repr-digest", b"x-amz-content-sha256", b"signature"}
)
"""Headers that sign or digest the body: it must stay unchanged."""


@dataclass(eq=False)
class InjectingRelays(Relays):
    """Relays that inject into requests, as each one's upstream allows."""

    wanted: frozenset[Injection] = field(kw_only=True)
    passed_by: Counter[str] = field(init=False, default_factory=Counter)
    """Requests left unchanged and responses passed with additions, by reason."""

    def new_relay(self, head: RequestHead, client: ClientConnection) -> Relay:
        endpoint = recorded_endpoint(head.target) if head.method == b"POST" else None
        if endpoint not in INJECTABLE or wants_websocket(head) or not self._has_dialect:
            return super().new_relay(head, client)
        reason = self._reason_to_pass_by(head)
        if reason is not None:
            self.count_passed_by(reason)
            return super().new_relay(head, client)
        relay = InjectingRelay(self, head, client, endpoint)
        relay.begin()
        return relay

    @property
    def _has_dialect(self) -> bool:
        return any(upstream.dialect is not None for upstream in self.upstreams.all)

    def count_passed_by(self, reason: str) -> None:
        self.passed_by[reason] += 1
        self.link.count_not_injected()

    def _reason_to_pass_by(self, head: RequestHead) -> str | None:
        names = head.names
        lengths = head.values(b"content-length")
        if b"content-encoding" in names:
            return "request_encoded"
        if b"expect" in names:
            return "request_waits_for_continue"  # the engine's word, which comes only after a head
        if not SIGNED.isdisjoint(names):
            return "request_signed"
        if lengths and int(lengths[0]) > self.max_body_bytes:
            return "request_larger_than_the_copy"
        return None


def new_relays(
    upstreams: Upstreams,
    link: RecorderLink,
    budget: CopyBudget,
    max_body_bytes: int,
    keep_headers: Sequence[str] = (),
    *,
    wanted: Collection[Injection],
) -> Relays:
    if not wanted:
        return Relays(upstreams, link, budget, max_body_bytes, keep_headers)
    return InjectingRelays(upstreams, link, budget, max_body_bytes, keep_headers, wanted=frozenset(wanted))


class InjectingRelay(RoutedRelay):
    """Relay of a request whose body may be changed, and of its response; it is held to its end."""

    __slots__ = ("_body", "_endpoint", "_filter", "_reframes")

    _relays: InjectingRelays

    def __init__(
        self, relays: InjectingRelays, head: RequestHead, client: ClientConnection, endpoint: Endpoint
    ) -> None:
        super().__init__(relays, head, client)
        self._endpoint = endpoint
        self._lacking_bytes = relays.max_body_bytes + 1
        self._body: bytes | None = None
        """The complete request, until its upstream is known and reached."""
        self._filter: ResponseFilter | None = None
        """Null: the response passes unchanged."""
        self._reframes = False
        """The response is chunked anew: a chunk for each read that leaves bytes."""

    def begin(self) -> None:
        self._copy = self._relays.new_copy(self._head, self._assignment.upstream.base_path)

    # The request, from the client.

    def request_body(self, raw: bytes, data: bytes) -> None:
        was_held = self._lacking_bytes > 0
        super().request_body(raw, data)
        if was_held and not self._lacking_bytes:
            self._relays.count_passed_by("request_larger_than_the_copy")
        elif was_held and self._copy is not None and self._copy.dropped is not None:
            self._relays.count_passed_by("copies_full")
            self._choose_and_send()

    def request_end(self) -> None:
        if self._lacking_bytes:
            self._body = b"".join(self._data)
        super().request_end()

    def _wait(self) -> None:
        """Wait for the end, however long it takes."""

    def _choose(self) -> None:
        if self._relays.upstreams.reads_prompt:
            super()._choose()

    def _start(self, server: ServerConnection) -> None:
        """Add what the upstream that was reached takes: another one may be another engine."""
        body, self._body = self._body, None
        dialect = self._assignment.upstream.dialect
        if body is not None and dialect is not None:
            try:
                asking, added = inject(body, self._endpoint, dialect, self._relays.wanted)
            except NOT_JSON:
                added = frozenset()
                self._relays.count_passed_by("request_not_json")
            if added:
                self._filter = ResponseFilter(added, dialect)
                if self._copy is not None:
                    self._copy.add_injected(sorted(added))
                self._head, self._unsent = with_length(self._head, len(asking)), [asking]
        super()._start(server)

    # The response, from the upstream.

    def response_head(self, head: ResponseHead) -> None:
        if self._filter is not None and not head.informational:
            if head.status != OK or not is_event_stream(head):
                self._filter = None
            elif is_encoded(head):
                self._relays.count_passed_by("response_encoded")
                self._filter = None
            else:
                head = without_length(head)
                self._reframes = bool(header_values(head.headers, b"transfer-encoding"))
        super().response_head(head)
        self._reframes = self._reframes and not self._dechunk

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Send the filtered read at once, and copy all of it."""
        if self._filter is None:
            super().response_body(at_ns, raw, data)
            return
        if self._before_body:
            self._begin_body()
        self._write_body(self._filter.feed(data))
        self._flush_response_start()  # after a read that leaves no bytes, the head goes alone
        if self._copy is not None:
            self._copy.response_body(at_ns, data)

    def response_end(self) -> None:
        if self._filter is not None:
            self._write_body(self._filter.finish())
            if self._reframes:
                self._flush_response_start(b"0\r\n\r\n")
        super().response_end()

    def _write_body(self, data: bytes) -> None:
        """Write a piece of the body, as one chunk if the upstream's body is chunked."""
        if data:
            self._flush_response_start(b"%x\r\n%b\r\n" % (len(data), data) if self._reframes else data)


def with_length(head: RequestHead, length: int) -> RequestHead:
    """Return the request's head for a body of this length, asking for a response without content coding."""
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
    """Return a response's head with chunks in place of a length, which the filter would change."""
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
