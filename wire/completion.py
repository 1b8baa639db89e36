"""What a response to a completion request says; the one place that knows which read carried the first token.

A read carries tokens when an event that it completes has a choice with token ids, or with non-empty text, content,
reasoning or tool-call arguments. A chat stream's opening event, which only names the role, carries none; neither does
the usage event at its end. A token's time is the time of the read that completed its event. Tokens of a read: its token
ids where the engine sends them, else one for each event and choice, which is what engines send unless they decode
several at a time.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from wire.sse import EventStream
from wire.stream import BodyRead


class PromptTokensDetails(msgspec.Struct):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """``usage`` of OpenAI's completions and chat completions."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class ToolFunction(msgspec.Struct):
    """A tool call's name and (part of) its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """One tool call of a message or of a delta."""

    function: ToolFunction | None = None


class Message(msgspec.Struct):
    """A chat choice's message, or the part of it that a streamed event adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """One choice, streamed or whole, of either endpoint."""

    index: int = 0
    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Event(msgspec.Struct):
    """One streamed event, or a whole response body."""

    model: str | None = None
    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None
    prompt_token_ids: list[int] | None = None


@dataclass(slots=True)
class Completion:
    """What a response said. Text and ids are for the caller's memory only: no part of kvtape writes or logs them."""

    first_token_ns: int | None = None
    """Time of the first token-bearing read. None: there was none, or the response was not streamed."""
    gaps_ns: list[int] = field(default_factory=list)
    """From each token-bearing read to the next."""
    gap_tokens: list[int] = field(default_factory=list)
    """Tokens of each later token-bearing read, parallel to ``gaps_ns``."""
    first_tokens: int = 0
    """Tokens of the first token-bearing read."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """As usage says. None: no usage came; ``seen_tokens`` is then what can be said."""
    cached_tokens: int | None = None
    """None: not reported; 0: a miss."""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    """Ids of the first choice's answer. None: the engine did not send them."""
    prompt_token_ids: list[int] | None = None
    text: str = ""
    """Text of the first choice's answer."""
    model: str | None = None
    done: bool = False
    """The response came to its own end: ``[DONE]``, or a whole body."""
    error_kind: str | None = None
    """``stream_error``: the engine reported an error in the stream; ``unparseable``: not what it should be."""

    @property
    def seen_tokens(self) -> int:
        """Tokens counted on the way."""
        return self.first_tokens + sum(self.gap_tokens)


_decode_event = msgspec.json.Decoder(Event).decode


def parse_completion(reads: Sequence[BodyRead], *, stream: bool, content_encoding: str | None = None) -> Completion:
    """Read a response body, whole or cut short. Never raises: what cannot be read is said in ``error_kind``."""
    if content_encoding not in {None, "", "identity"}:
        try:
            reads = decompressed(reads, content_encoding or "")
        except (ValueError, zlib.error):
            return Completion(error_kind="unparseable")
    return parse_stream(reads) if stream else parse_whole(b"".join(read.data for read in reads))


def decompressed(reads: Sequence[BodyRead], content_encoding: str) -> list[BodyRead]:
    """The reads with a gzip or deflate coding taken off, times kept. Raises ValueError for any other coding."""
    if content_encoding not in {"gzip", "x-gzip", "deflate"}:
        raise ValueError(content_encoding)
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    return [BodyRead(read.at_ns, inflater.decompress(read.data)) for read in reads]


def parse_stream(reads: Sequence[BodyRead]) -> Completion:
    """Follow a streamed response read by read."""
    completion = Completion()
    events = EventStream()
    texts: list[str] = []
    last_token_ns = 0
    for at_ns, data in reads:
        tokens = 0
        for event_bytes in events.feed(data):
            if event_bytes == b"[DONE]":
                completion.done = True
                continue
            try:
                event = _decode_event(event_bytes)
            except msgspec.DecodeError:
                completion.error_kind = "unparseable"
                continue
            tokens += take_event(completion, event, texts)
        if tokens == 0:
            continue
        if completion.first_token_ns is None:
            completion.first_token_ns = at_ns
            completion.first_tokens = tokens
        else:
            completion.gaps_ns.append(at_ns - last_token_ns)
            completion.gap_tokens.append(tokens)
        last_token_ns = at_ns
    completion.text = "".join(texts)
    return completion


def parse_whole(body: bytes) -> Completion:
    """Read a response that came in one piece."""
    completion = Completion()
    try:
        event = _decode_event(body)
    except msgspec.DecodeError:
        completion.error_kind = "unparseable"
        return completion
    texts: list[str] = []
    take_event(completion, event, texts)
    completion.text = "".join(texts)
    completion.done = True
    return completion


def take_event(completion: Completion, event: Event, texts: list[str]) -> int:
    """Add one event to what is known; returns how many tokens it carried."""
    if event.error is not None:
        completion.error_kind = "stream_error"
    if event.model is not None:
        completion.model = event.model
    if event.prompt_token_ids is not None:
        completion.prompt_token_ids = event.prompt_token_ids
    if event.usage is not None:
        take_usage(completion, event.usage)
    return sum(take_choice(completion, choice, texts) for choice in event.choices)


def take_usage(completion: Completion, usage: Usage) -> None:
    """The last usage counts: engines that repeat it on every event make it grow."""
    completion.prompt_tokens = usage.prompt_tokens
    completion.output_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        completion.cached_tokens = usage.prompt_tokens_details.cached_tokens


def take_choice(completion: Completion, choice: Choice, texts: list[str]) -> int:
    """Add one choice's part; returns how many tokens it carried. Text and ids are kept of the first choice alone."""
    message = choice.delta or choice.message
    said = choice.text or (message_text(message) if message else "")
    if choice.index == 0:
        texts.append(said)
        completion.finish_reason = choice.finish_reason or completion.finish_reason
        if choice.prompt_token_ids is not None:
            completion.prompt_token_ids = choice.prompt_token_ids
        if choice.token_ids is not None:
            completion.token_ids = (completion.token_ids or []) + choice.token_ids
    if choice.token_ids is not None:
        return len(choice.token_ids)
    return 1 if said else 0


def message_text(message: Message) -> str:
    """Everything a message says that cost tokens: reasoning, content and tool calls."""
    parts = [message.reasoning_content or message.reasoning or "", message.content or ""]
    for call in message.tool_calls or ():
        if call.function is not None:
            parts += [call.function.name or "", call.function.arguments or ""]
    return "".join(parts)
