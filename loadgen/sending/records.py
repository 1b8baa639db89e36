"""Record of an ended exchange (latencies, token counts), and its response for the plan's follow-ups."""

from engines.dialect import decoded
from loadgen.core.job import Response
from loadgen.sending.exchange import Exchange
from tracefile.hashing.blockhash import MAX_TOKEN
from tracefile.records.schema import Record, Status, TokensSource
from wire.answer import parse_answer
from wire.completion import Completion

HTTP_ERROR = 400
EXPLAINED = frozenset({400, 404, 413, 422})
"""Statuses whose body describes a fault of the request; that of 401 or 403 may quote a key."""
MOST_REASON_CHARS = 300


def response_of(exchange: Exchange, zero_ns: int) -> Response:
    """Parse an exchange: record, output token ids and text. ``zero_ns``: t = 0."""
    request = exchange.order.request
    assert request is not None  # sent
    completion = parse_answer(request.path, exchange.reads, stream=request.stream)
    if any(
        ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN
        for ids in (completion.token_ids, completion.prompt_token_ids)
    ):
        completion.error_kind, completion.token_ids, completion.prompt_token_ids = "unparseable", None, None
    return Response(
        record=_record(exchange, completion, zero_ns),
        end_ms=(exchange.end_ns - zero_ns) / 1e6,
        token_ids=completion.token_ids,
        prompt_token_ids=completion.prompt_token_ids,
        text=completion.text,
    )


def reason_of(exchange: Exchange) -> str:
    """Return the error message in the body of a refused request; empty: not refused, or no message."""
    if exchange.status not in EXPLAINED:
        return ""
    body = decoded(b"".join([data for _, data in exchange.reads]))
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(str(message or "").split())[:MOST_REASON_CHARS]


def _record(exchange: Exchange, completion: Completion, zero_ns: int) -> Record:
    order = exchange.order
    request = order.request
    assert request is not None
    arrival_ms = _ms(exchange.sent_ns - zero_ns)
    status, error = _outcome(exchange, completion, stream=request.stream)
    parent_end_ms = None if request.parent_id is None else order.parent_end_ms
    return Record(
        request_id=request.request_id,
        session_id=request.session_id,
        session_source=None if request.session_id is None else "explicit",
        parent_id=request.parent_id,
        turn=request.turn,
        arrival_ms=arrival_ms,
        scheduled_ms=_ms(exchange.scheduled_ns - zero_ns),
        held=exchange.held or None,
        first_byte_ms=_since(exchange.reads[0][0], exchange.sent_ns) if exchange.reads else None,
        ttft_ms=_since(completion.first_token_ns, exchange.sent_ns) if request.stream else None,
        itl_ms=[round(gap_ns / 1e6, 3) for gap_ns in completion.gaps_ns],
        itl_tokens=completion.gap_tokens,
        e2e_ms=_ms(exchange.end_ns - exchange.sent_ns),
        status=status,
        http_status=exchange.status,
        error=error,
        finish_reason=completion.finish_reason,
        endpoint=request.path,
        model=request.model,
        stream=request.stream,
        max_tokens=request.max_tokens,
        priority=request.priority,
        n=request.n,
        prompt_tokens=request.prompt_tokens if completion.prompt_tokens is None else completion.prompt_tokens,
        planned_prompt_tokens=request.prompt_tokens,
        output_tokens=_output_tokens(completion),
        cached_tokens=completion.cached_tokens,
        tokens_source=_tokens_source(completion, request.prompt_tokens),
        concurrency=exchange.concurrency or None,
        think_ms=None if parent_end_ms is None else round(arrival_ms - parent_end_ms, 3),
    )


def _output_tokens(completion: Completion) -> int | None:
    """Output tokens by usage; without usage (an interrupted stream) the tokens received."""
    if completion.output_tokens is not None:
        return completion.output_tokens
    return completion.streamed_tokens or None


def _tokens_source(completion: Completion, planned: int | None) -> TokensSource | None:
    if completion.prompt_tokens is not None:
        return "usage"
    return "estimate" if completion.streamed_tokens or planned is not None else None


def _outcome(exchange: Exchange, completion: Completion, *, stream: bool) -> tuple[Status, str | None]:
    if exchange.outcome != "ok":
        return exchange.outcome, exchange.error_kind
    if exchange.status is not None and exchange.status >= HTTP_ERROR:
        return "error", f"http_{exchange.status}"
    if completion.error_kind is not None:
        return "error", completion.error_kind
    if stream and not completion.done and completion.finish_reason is None:
        return "upstream_abort", "no_end_of_stream"
    return "ok", None


def _since(at_ns: int | None, start_ns: int) -> float | None:
    return None if at_ns is None else _ms(at_ns - start_ns)


def _ms(nanoseconds: float) -> float:
    """Milliseconds, rounded to the microsecond: finer digits are noise."""
    return round(nanoseconds / 1e6, 3)
