"""The copy of a response, read: what it says of tokens, whatever its coding and API, and however much was kept."""

from tap.ipc.exchange import ExchangeCopy
from tap.recorder.contentcoding import UndecodableError, decode_reads
from wire.answer import GENERATING, parse_answer
from wire.completion import Completion

USAGE = b'"usage":'
"""Within a string its quotes would be escaped."""


def read_answer(exchange: ExchangeCopy, *, asked_stream: bool) -> Completion | None:
    """What the response said; null if none came, or its coding cannot be undone.

    ``asked_stream`` decides how a body without a ``Content-Type`` is read.
    """
    if exchange.http_status is None:
        return None
    content_type = exchange.response_headers.get("content-type", "").lower()
    if exchange.endpoint not in GENERATING and "json" not in content_type:
        return Completion(done=True)  # audio, a file: there is nothing to read in it
    stream = content_type.startswith("text/event-stream") if content_type else asked_stream
    try:
        reads = decode_reads(exchange.response_reads, exchange.response_headers.get("content-encoding"))
    except UndecodableError:
        return None
    answer = parse_answer(exchange.endpoint, reads, stream=stream)
    if not exchange.response_whole:
        answer = _cut_answer(exchange, answer, stream=stream)
    if exchange.endpoint not in GENERATING and answer.error_kind == "unparseable":
        return Completion(done=True)
    return answer


def _cut_answer(exchange: ExchangeCopy, beginning: Completion, *, stream: bool) -> Completion:
    """Of a response larger than the copy: the first token's time, and from its last reads usage and finish."""
    if not stream:
        return _cut_whole(exchange)
    end = parse_answer(exchange.endpoint, exchange.last_reads, stream=True)
    return Completion(
        first_token_ns=beginning.first_token_ns,
        # Anthropic tells the prompt's length at the start already.
        prompt_tokens=beginning.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens,
        output_tokens=end.output_tokens,
        cached_tokens=beginning.cached_tokens if end.cached_tokens is None else end.cached_tokens,
        finish_reason=end.finish_reason,
        prompt_token_ids=beginning.prompt_token_ids,
        # A last event that repeats the whole answer may begin before what was kept.
        done=end.done or exchange.endpoint == "/v1/responses",
    )


def _cut_whole(exchange: ExchangeCopy) -> Completion:
    """Of one JSON object, what its last members say, from ``usage`` on: embeddings come before it."""
    tail = b"".join(data for _, data in exchange.last_reads)
    at = tail.rfind(USAGE)
    end = Completion() if at < 0 else parse_answer(exchange.endpoint, [(0, b"{" + tail[at:])], stream=False)
    return Completion(
        prompt_tokens=end.prompt_tokens,
        output_tokens=end.output_tokens,
        cached_tokens=end.cached_tokens,
        finish_reason=end.finish_reason,
        done=True,
    )
