"""From bytes with times to an answer and its record."""

from dataclasses import dataclass

from loadgen.core.plan import Response
from loadgen.core.request import PlannedRequest
from loadgen.sending.crossing import Ended
from loadgen.sending.lookahead import Clocks
from tracefile import Record
from tracefile.records.schema import Status, TokensSource
from wire.answer import parse_answer
from wire.completion import Completion

HTTP_ERROR = 400


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that has ended, and what is known of it."""

    request: PlannedRequest
    ended: Ended
    parent_end_ms: float | None
    """When the request that this one follows ended, on the trace's clock; null: a root."""


def answer_of(sent: Sent, clocks: Clocks) -> Response:
    """Return the result of a request: its record as far as the wire tells, and the output's ids and text."""
    request, ended = sent.request, sent.ended
    completion = parse_answer(request.path, ended.reads, stream=request.stream)
    return Response(
        record=_record(sent, completion, clocks),
        end_ms=clocks.plan_ms(ended.end_ns),
        token_ids=completion.token_ids,
        prompt_token_ids=completion.prompt_token_ids,
        text=completion.text,
    )


def _record(sent: Sent, completion: Completion, clocks: Clocks) -> Record:
    request, ended = sent.request, sent.ended
    arrival_ms = _ms(ended.sent_ns - clocks.zero_ns)
    status, error = _outcome(ended, completion, stream=request.stream)
    parent_end_ms = None if request.parent_id is None else sent.parent_end_ms
    return Record(
        request_id=request.request_id,
        session_id=request.session_id,
        session_source=None if request.session_id is None else "explicit",
        parent_id=request.parent_id,
        turn=request.turn,
        arrival_ms=arrival_ms,
        scheduled_ms=_ms(ended.scheduled_ns - clocks.zero_ns),
        first_byte_ms=_since(ended.reads[0][0], ended.sent_ns) if ended.reads else None,
        ttft_ms=_since(completion.first_token_ns, ended.sent_ns) if request.stream else None,
        itl_ms=[round(gap_ns / 1e6, 3) for gap_ns in completion.gaps_ns],
        itl_tokens=completion.gap_tokens,
        e2e_ms=_ms(ended.end_ns - ended.sent_ns),
        status=status,
        http_status=ended.status,
        error=error,
        finish_reason=completion.finish_reason,
        endpoint=request.path,
        model=request.model,
        stream=request.stream,
        max_tokens=request.max_tokens,
        priority=request.priority,
        n=request.n,
        prompt_tokens=request.prompt_tokens if completion.prompt_tokens is None else completion.prompt_tokens,
        output_tokens=_output_tokens(completion),
        cached_tokens=completion.cached_tokens,
        tokens_source=_tokens_source(completion, request.prompt_tokens),
        concurrency=ended.concurrency or None,
        think_ms=None if parent_end_ms is None else round(arrival_ms - parent_end_ms, 3),
    )


def _output_tokens(completion: Completion) -> int | None:
    """Return usage's count; without usage (a stream cut short) the tokens that were seen."""
    if completion.output_tokens is not None:
        return completion.output_tokens
    return completion.seen_tokens or None


def _tokens_source(completion: Completion, planned: int | None) -> TokensSource | None:
    if completion.prompt_tokens is not None:
        return "usage"
    return "estimate" if completion.seen_tokens or planned is not None else None


def _outcome(ended: Ended, completion: Completion, *, stream: bool) -> tuple[Status, str | None]:
    """Return how the request ended: the wire's status first, then the engine's."""
    if ended.outcome != "ok":
        return ended.outcome, ended.error_kind
    if ended.status is not None and ended.status >= HTTP_ERROR:
        return "error", f"http_{ended.status}"
    if completion.error_kind is not None:
        return "error", completion.error_kind
    if stream and not completion.done:
        return "upstream_abort", "no_end_of_stream"
    return "ok", None


def _since(at_ns: int | None, start_ns: int) -> float | None:
    return None if at_ns is None else _ms(at_ns - start_ns)


def _ms(nanoseconds: float) -> float:
    """Milliseconds to the microsecond: finer digits are noise that costs bytes."""
    return round(nanoseconds / 1e6, 3)
