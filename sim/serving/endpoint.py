"""Generation endpoints; a slow reader gets all tokens since its last read in one event, as from vLLM."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from sim.serving.apis import CompletionEncoder, Delta, Usage
from sim.serving.exchange import JSON_TYPE, Exchange, HttpRequest
from sim.serving.fields import ApiError
from sim.serving.output import Generation
from sim.serving.realtime import RealTimeEngine
from sim.serving.service import PlannedRequest, Service
from wire.head import Header

EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
Reader = Callable[[Service, bytes], PlannedRequest]


class Reply:
    """State of a response: tokens sent and tokens to send."""

    def __init__(self, exchange: Exchange, request: PlannedRequest) -> None:
        self._exchange, self._request = exchange, request
        self._streams = bool(request.fields.stream)
        self._encoder: CompletionEncoder
        self._engine: RealTimeEngine
        self._headers: Sequence[Header] = ()
        self._generations: Sequence[Generation] = ()
        self._sent: list[int] = []
        """Tokens sent, per choice."""
        self._open_choices = 0
        self._delivery: asyncio.TimerHandle | None = None
        """Timer of the first token's delivery."""
        self._delivery_ms = 0.0
        """Delivery time of the first token, ms."""

    def begin(
        self,
        encoder: CompletionEncoder,
        generations: Sequence[Generation],
        engine: RealTimeEngine,
        headers: Sequence[Header],
    ) -> None:
        """Start the response before the scheduler has the request."""
        self._encoder, self._generations, self._engine, self._headers = encoder, generations, engine, headers
        self._sent = [0] * len(generations)
        self._open_choices = len(generations)
        self._exchange.on_gone, self._exchange.on_writable = self.abandon, self._catch_up
        if self._streams:
            self._delivery_ms = engine.delivery_ms(sum(map(len, self._request.prompts)))
            self._exchange.begin(200, (EVENT_STREAM, *headers))

    def progress(self, generation: Generation) -> None:
        """Handle a new token, or an abort by the engine."""
        if generation.outcome == "aborted":
            self._exchange.cut()
        elif not self._streams:
            self._open_choices -= generation.outcome is not None
            if not self._open_choices:
                self._send_response()
        elif self._delivery is None and self._exchange.writable:
            if self._delivery_ms:
                wait_s, self._delivery_ms = self._delivery_ms / 1e3, 0.0
                self._delivery = asyncio.get_running_loop().call_later(wait_s, self._delivered)
            else:
                self._send(generation)

    def abandon(self) -> None:
        """Abort the request after the client disconnected, to free its KV cache blocks."""
        if self._delivery is not None:
            self._delivery.cancel()
        for generation in self._generations:
            self._engine.abort(generation)

    def _delivered(self) -> None:
        self._delivery = None
        self._catch_up()

    def _catch_up(self) -> None:
        for generation in self._generations:
            is_free = self._streams and self._delivery is None and self._exchange.writable
            if is_free and generation.delivered > self._sent[generation.index]:
                self._send(generation)

    def _send(self, generation: Generation) -> None:
        index, stop = generation.index, generation.delivered
        start, self._sent[index] = self._sent[index], stop
        ended = generation.outcome is not None
        delta = Delta(generation, start, stop, generation.output.finish_reason if ended else None)
        events = self._encoder.delta(delta)
        self._open_choices -= ended
        if self._open_choices:
            self._exchange.write(events)
        else:
            self._exchange.end(events + self._encoder.closing(self._usage()))

    def _send_response(self) -> None:
        self._sent = [choice.delivered for choice in self._generations]
        deltas = [Delta(choice, 0, choice.delivered, choice.output.finish_reason) for choice in self._generations]
        body = self._encoder.response(deltas, self._usage())
        self._exchange.respond(200, (JSON_TYPE, *self._headers), body)

    def _usage(self) -> Usage:
        firsts = self._generations[:: self._request.choices]
        cached = sum(max(generation.request.cached_tokens, 0) for generation in firsts)
        return Usage(sum(map(len, self._request.prompts)), sum(self._sent), cached)


class Endpoint:
    """Handler of one generation API, streamed or not."""

    def __init__(self, service: Service, read: Reader, encoder: type[CompletionEncoder]) -> None:
        self._service, self._read, self._encoder = service, read, encoder

    def __call__(self, request: HttpRequest, exchange: Exchange) -> None:
        service = self._service
        try:
            if request.head.method != b"POST":
                raise ApiError("Method Not Allowed", status=405)
            planned = self._read(service, request.body)
            reply = Reply(exchange, planned)
            generations = service.plan(planned, reply.progress)
        except ApiError as error:
            exchange.respond(error.status, (JSON_TYPE,), error.body())
            return
        engine_index = service.fleet.route(request.header(b"x-session-id"), planned.fields, generations)
        engine = service.fleet.engines[engine_index]
        response_id = self._encoder.id_prefix + (request.header(b"x-request-id") or secrets.token_hex(16))
        encoder = self._encoder(service, planned, response_id, int(time.time()))
        reply.begin(encoder, generations, engine, ((b"x-engine", b"%d" % engine_index),))
        arrival_ms = engine.time_ms(request.head.at_ns)
        for generation in generations:
            engine.submit(generation, arrival_ms)
