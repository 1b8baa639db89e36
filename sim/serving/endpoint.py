"""Generating endpoints; a slow reader gets all tokens since its last read in one event, as from vLLM."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from sim.serving.apis.encoder import Api, Delta, ResponseEncoder, Usage
from sim.serving.engine.faults import Injection
from sim.serving.engine.realtime import RealTimeEngine
from sim.serving.engine.service import Service
from sim.serving.exchange import JSON_TYPE, Exchange, HttpRequest
from sim.serving.requests.errors import ApiError
from sim.serving.requests.fields import Asked
from sim.serving.requests.output import Generation
from tracefile.records.errors import InputError
from wire.head import Header

EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
ENCODED_AHEAD = 32
"""Tokens whose events are made at once, before they come: a few kilobytes of each stream."""
GARBAGE = b'data: {"id":"garbage","choices":[{"index":0,"delta":{"content":"\xff\xfe\n\n'


class Reply:
    """State of a request's response: tokens sent and tokens to send."""

    def __init__(self, exchange: Exchange, asked: Asked, injection: Injection | None) -> None:
        self._exchange, self._asked, self._injection = exchange, asked, injection
        self._streams = bool(asked.fields.stream)
        options = asked.fields.stream_options
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._encoder: ResponseEncoder
        self._engine: RealTimeEngine
        self._headers: Sequence[Header] = ()
        self._generations: Sequence[Generation] = ()
        self._told: list[int] = []
        self._ahead: list[list[bytes]] = []
        """Events of each choice's next tokens, the last first."""
        self._open_choices = 0
        self._held: asyncio.TimerHandle | None = None
        """Runs while nothing is written on purpose."""
        self._delivery_ms = 0.0
        """What the first token takes yet to be sent."""
        self._trigger = -1
        """Tokens told, over all choices, at which what was injected into the output's middle happens; -1: none."""
        self._is_plain = not self._continuous
        """Whether tokens in the middle of an output may be encoded before they come."""

    def begin(
        self,
        encoder: ResponseEncoder,
        generations: Sequence[Generation],
        engine: RealTimeEngine,
        headers: Sequence[Header],
    ) -> None:
        """Before the engine has the request."""
        self._encoder, self._generations, self._engine, self._headers = encoder, generations, engine, headers
        self._told = [0] * len(generations)
        self._ahead = [[] for _ in generations]
        self._open_choices = len(generations)
        self._delivery_ms = engine.delivery_ms(sum(map(len, self._asked.prompts))) if self._streams else 0.0
        self._exchange.on_gone = self.abandon
        self._exchange.on_writable = self._catch_up
        injection = self._injection
        if injection is not None:
            total = sum(generation.request.output_tokens for generation in generations)
            if injection.stall_ms or injection.garbage or injection.ending:
                self._trigger = int(injection.share * total)
                self._is_plain = False
            if injection.first_byte_ms:
                self._hold(injection.first_byte_ms, self._open)
                return
        self._open()

    def progress(self, generation: Generation) -> None:
        """A token has come, or the engine has given the output up."""
        ahead = self._ahead[generation.place]
        if ahead and generation.outcome is None:  # as nearly always: a token is a call of the transport's
            if self._exchange.offer(ahead[-1]):
                ahead.pop()
                self._told[generation.place] += 1
        elif generation.outcome == "aborted":
            self._exchange.cut()
        elif self._held is None and self._exchange.writable:
            if self._delivery_ms:
                delivery_ms, self._delivery_ms = self._delivery_ms, 0.0
                self._hold(delivery_ms, self._go_on)
            elif self._streams:
                self._tell(generation)
            elif generation.outcome is not None:
                self._open_choices -= 1
                if not self._open_choices:
                    self._tell_whole()

    def abandon(self) -> None:
        """The client has gone: its request's blocks are needed elsewhere."""
        if self._held is not None:
            self._held.cancel()
        for generation in self._generations:
            self._engine.abort(generation)

    def _open(self) -> None:
        self._held = None
        if self._streams:
            self._exchange.begin(200, (EVENT_STREAM, *self._headers))
        self._catch_up()

    def _go_on(self) -> None:
        self._held = None
        self._catch_up()

    def _catch_up(self) -> None:
        if self._held is not None or not self._exchange.writable:
            return
        if not self._streams:
            self._open_choices = sum(generation.outcome is None for generation in self._generations)
            if not self._open_choices:
                self._tell_whole()
            return
        for generation in self._generations:
            if self._held is None and generation.delivered > self._told[generation.place]:
                self._tell(generation)

    def _tell(self, generation: Generation) -> None:
        place, stop = generation.place, generation.delivered
        start, self._told[place] = self._told[place], stop
        ended = generation.outcome is not None
        delta = Delta(generation, start, stop, generation.output.finish_reason if ended else None)
        said = self._encoder.delta(delta, self._usage(with_cached=False) if self._continuous else None)
        if ended:
            self._open_choices -= 1
            if not self._open_choices:
                said += self._encoder.closing(self._usage(with_cached=True))
        if 0 <= self._trigger <= sum(self._told):
            self._go_wrong(said)
        else:
            self._say(said)
        if self._is_plain and not ended:
            self._encode_ahead(generation)

    def _encode_ahead(self, generation: Generation) -> None:
        """Encode the tokens that come next, but for the output's last one, which says more than itself."""
        place, token_ids = generation.place, generation.output.token_ids
        told = self._told[place]
        coming = token_ids[told : min(told + ENCODED_AHEAD, len(token_ids) - 1)]
        said = self._encoder.tokens(place, coming)
        self._is_plain = bool(said) or not coming
        self._ahead[place] = self._exchange.chunks(said)[::-1]

    def _tell_whole(self) -> None:
        self._told = [generation.delivered for generation in self._generations]
        deltas = [
            Delta(generation, 0, generation.delivered, generation.output.finish_reason)
            for generation in self._generations
        ]
        body = self._encoder.whole(deltas, self._usage(with_cached=True))
        headers = (JSON_TYPE, *self._headers)
        if self._trigger < 0 or self._injection is None:
            self._exchange.whole(200, headers, body)
            return
        place = max(1, int(self._injection.share * len(body)))
        self._exchange.begin(200, headers)
        self._exchange.write(body[:place])
        self._go_wrong(body[place:])

    def _say(self, said: bytes) -> None:
        if not self._open_choices:
            self._exchange.end(said)
        elif said:
            self._exchange.write(said)

    def _go_wrong(self, said: bytes) -> None:
        assert self._injection is not None
        self._trigger = -1
        if self._injection.garbage:
            said = GARBAGE + said
        if self._injection.stall_ms:
            self._hold(self._injection.stall_ms, lambda: self._say_badly(said))
        else:
            self._say_badly(said)

    def _say_badly(self, said: bytes) -> None:
        assert self._injection is not None
        self._held = None
        if self._injection.ending is None:
            self._say(said)
            self._catch_up()
            return
        if self._injection.ending == "reset":
            self._exchange.reset()
        else:
            self._exchange.write(said[: max(1, len(said) // 2)])
            self._exchange.cut()
        self.abandon()

    def _hold(self, for_ms: float, then: Callable[[], None]) -> None:
        """Write nothing for so long, whatever the engine's speed."""
        self._held = asyncio.get_running_loop().call_later(for_ms / 1e3, then)

    def _usage(self, *, with_cached: bool) -> Usage:
        firsts = self._generations[:: self._asked.fields.n or 1]
        cached = sum(generation.request.cached_tokens or 0 for generation in firsts) if with_cached else None
        return Usage(sum(map(len, self._asked.prompts)), sum(self._told), cached)


class Endpoint:
    """A handler that outputs in one API, streaming or not."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service, self._api = service, api

    def __call__(self, request: HttpRequest, exchange: Exchange) -> None:
        if request.head.method != b"POST":
            self._refuse(exchange, ApiError("Method Not Allowed", status=405), ((b"allow", b"POST"),))
            return
        service = self._service
        try:
            injection = service.faults.draw(request.header(b"x-request-id"), request.header(b"x-fault"))
            if injection is not None and injection.refusal is not None:
                self._refuse_on_purpose(exchange, injection.refusal, injection.retry_after_s)
                return
            asked = self._api.read(service, request.body)
            reply = Reply(exchange, asked, injection)
            generations = service.plan(asked, reply.progress)
        except InputError as error:
            self._refuse(exchange, ApiError(str(error)))
            return
        except ApiError as error:
            self._refuse(exchange, error)
            return
        place = service.fleet.route(request.header(b"x-session-id"), asked.fields, generations)
        engine = service.fleet.engines[place]
        response_id = self._api.id_prefix + (request.header(b"x-request-id") or secrets.token_hex(16))
        encoder = self._api.encoder(service, asked, response_id, int(time.time()))
        reply.begin(encoder, generations, engine, ((b"x-engine", b"%d" % place),))
        arrival_ms = engine.time_ms(request.head.at_ns)
        extra_ms = service.fleet.load(place, asked.fields) + (0.0 if injection is None else injection.extra_ms)
        for generation in generations:
            engine.submit(generation, arrival_ms, extra_ms)

    def _refuse(self, exchange: Exchange, error: ApiError, headers: tuple[Header, ...] = ()) -> None:
        exchange.whole(error.status, (JSON_TYPE, *headers), error.body())

    def _refuse_on_purpose(self, exchange: Exchange, status: int, retry_after_s: int) -> None:
        kind = "RateLimitError" if status == 429 else "InternalServerError" if status >= 500 else "BadRequestError"
        headers = ((b"retry-after", b"%d" % retry_after_s),) if status in (429, 503) else ()
        self._refuse(exchange, ApiError("an injected fault", status=status, kind=kind), headers)
