"""A generating endpoint: a request from its body to its reply's beginning, in whichever API."""

import secrets
import time

from sim.serving.apis.voice import Api
from sim.serving.engine.service import Service
from sim.serving.exchange import JSON_TYPE, Exchange, HttpRequest
from sim.serving.reply import Reply
from sim.serving.requests.errors import ApiError
from tracefile.records.errors import InputError
from wire.head import Header


class Endpoint:
    """A handler that answers in one API, streaming or not."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service, self._api = service, api

    def __call__(self, request: HttpRequest, exchange: Exchange) -> None:
        """Read a request, refuse it, or begin its reply and let the engine have it."""
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
        place = service.route(asked, generations, request.header(b"x-session-id"))
        engine = service.fleet.engines[place]
        response_id = self._api.id_prefix + (request.header(b"x-request-id") or secrets.token_hex(16))
        voice = self._api.voice(service, asked, response_id, int(time.time()))
        reply.begin(voice, generations, engine, ((b"x-engine", b"%d" % place),))
        arrival_ms = engine.time_ms(request.head.at_ns)
        for generation in generations:
            engine.submit(generation, arrival_ms, 0.0 if injection is None else injection.extra_ms)

    def _refuse(self, exchange: Exchange, error: ApiError, headers: tuple[Header, ...] = ()) -> None:
        exchange.whole(error.status, (JSON_TYPE, *headers), self._api.error(error))

    def _refuse_on_purpose(self, exchange: Exchange, status: int, retry_after_s: int) -> None:
        kind = "RateLimitError" if status == 429 else "InternalServerError" if status >= 500 else "BadRequestError"
        headers = ((b"retry-after", b"%d" % retry_after_s),) if status in (429, 503) else ()
        self._refuse(exchange, ApiError("an injected fault", status=status, kind=kind), headers)
