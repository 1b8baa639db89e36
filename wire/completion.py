"""Responses to completion requests, and the only rule for the read that carried the first token.

A read carries tokens when an event that it completes does: one with a choice that has token ids, or non-empty text,
content, reasoning or tool-call arguments. A chat stream's opening event, which only names the role, carries none;
neither does the usage event at its end. A token's time is the time of the read that completed its event. The events of
other APIs than OpenAI's completions are read in files of their own, under the same rule (``wire/answer.py``).

Tokens of a read: its token ids where the engine sends them, else one for each event and choice. Where usage then tells
of far more or of fewer tokens than that (an engine that sends several at a time), each read gets its share of them in
proportion to its events. A few more are left with the first read: tokens without text, such as the one that stops.
"""

from collections.abc import Callable, Sequence

import msgspec

from wire.events import (
    UNREADABLE,
    Choice,
    Event,
    Timings,
    TokensDetails,
    choice_text,
    decode_event,
    has_unspoken,
    token_count,
)
from wire.jsonsize import LARGE_BYTES, fits_in_memory

WITHOUT_TEXT = 2
"""Tokens that usage may count and no event show, however short the answer: one that stops, one within a character."""


class Completion(msgspec.Struct):
    """Content of a response. Text and ids are for the caller's memory only: no part of kvtape writes or logs them."""

    first_token_ns: int | None = None
    """Time of the first token-bearing read. None: there was none, or the response was not streamed."""
    gaps_ns: list[int] = []
    """From each token-bearing read to the next."""
    gap_tokens: list[int] = []
    first_tokens: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """As usage says. None: no usage came; ``seen_tokens`` is then what can be said."""
    cached_tokens: int | None = None
    """None: not reported; 0: a miss."""
    prompt_parts: dict[str, int] = {}
    """Tokens of the prompt's parts, where usage counts these."""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    """Ids of the first choice's answer. None: the engine did not send them."""
    prompt_token_ids: list[int] | None = None
    text: str = ""
    """Text of the first choice's answer, without reasoning and tool calls."""
    model: str | None = None
    done: bool = False
    """The response came to its own end: ``[DONE]``, or a whole body."""
    error_kind: str | None = None
    """``stream_error``: the engine reported an error within a response; ``unparseable``: not what it should be."""

    @property
    def seen_tokens(self) -> int:
        return self.first_tokens + sum(self.gap_tokens)

    def add_token_ids(self, ids: Sequence[int]) -> None:
        self.token_ids = self.token_ids or []
        self.token_ids += ids


EventTaker = Callable[[Completion, bytes, list[str]], int]
"""Adds one event's data (or a whole body) to what is known, its text to the list, and returns how many tokens it
carried. Raises one of ``UNREADABLE`` where it is not what an engine sends."""


def take_data(completion: Completion, data: bytes, texts: list[str]) -> int:
    """The taker of OpenAI's completions and chat completions."""
    return take_event(completion, decode_event(data), texts)


def parse_stream(reads: Sequence[tuple[int, bytes]], take: EventTaker = take_data) -> Completion:
    """Follow a streamed response by its reads: when each arrived, in ns, and its bytes without chunk framing."""
    completion = Completion()
    events = EventStream()
    texts: list[str] = []
    gaps_ns, gap_tokens = completion.gaps_ns, completion.gap_tokens
    last_token_ns: int | None = None
    for at_ns, read in reads:
        tokens = 0
        for data in events.feed(read):
            try:
                if data == b"[DONE]":
                    completion.done = True
                elif len(data) > LARGE_BYTES and not fits_in_memory(data):
                    completion.error_kind = "unparseable"
                else:
                    tokens += take(completion, data, texts)
            except UNREADABLE:
                completion.error_kind = "unparseable"
        if tokens == 0:
            continue
        if last_token_ns is None:
            completion.first_token_ns = at_ns
            completion.first_tokens = tokens
        else:
            gaps_ns.append(at_ns - last_token_ns)
            gap_tokens.append(tokens)
        last_token_ns = at_ns
    completion.text = "".join(texts)
    share_usage(completion)
    return completion


def share_usage(completion: Completion) -> None:
    """Make the reads' tokens add up to usage's where events were counted."""
    seen, output = completion.seen_tokens, completion.output_tokens
    if output is None or seen == 0 or completion.token_ids is not None:
        return
    if seen <= output <= seen + max(WITHOUT_TEXT, seen // 10):
        completion.first_tokens = output - sum(completion.gap_tokens)
        return
    events, given = 0, 0
    shares: list[int] = []
    for count in (completion.first_tokens, *completion.gap_tokens):
        events += count
        shares.append(-(-events * output // seen) - given)  # rounded up, so that the first read has a token
        given += shares[-1]
    completion.first_tokens, completion.gap_tokens = shares[0], shares[1:]


def parse_whole(body: bytes, take: EventTaker = take_data) -> Completion:
    """Read a response that came in one piece."""
    completion = Completion()
    texts: list[str] = []
    try:
        take(completion, body, texts)
    except UNREADABLE:
        return Completion(error_kind="unparseable")
    completion.text = "".join(texts)
    completion.done = True
    return completion


def take_event(completion: Completion, event: Event, texts: list[str]) -> int:
    """Add one event to what is known; returns how many tokens it carried."""
    if event.error is not None or event.object == "error":
        completion.error_kind = "stream_error"
    if event.model is not None:
        completion.model = event.model
    if event.prompt_token_ids is not None:
        completion.prompt_token_ids = event.prompt_token_ids
    if event.timings is not None:
        take_timings(completion, event.timings)
    if (usage := event.usage) is not None:
        take_usage(completion, usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details)
    tokens = 0
    for choice in event.choices or ():
        tokens += take_choice(completion, choice, texts)
    return tokens


def take_usage(completion: Completion, prompt: int | None, output: int | None, details: TokensDetails | None) -> None:
    """The last usage counts: engines that repeat it on every event make it grow."""
    completion.prompt_tokens, completion.output_tokens = token_count(prompt), token_count(output)
    if details is not None:
        completion.cached_tokens = token_count(details.cached_tokens)


def take_timings(completion: Completion, timings: Timings) -> None:
    """llama.cpp's own account, sent where no usage was asked for; usage in the same event has the last word."""
    cached, computed, made = (token_count(told) for told in (timings.cache_n, timings.prompt_n, timings.predicted_n))
    if cached is not None:
        completion.cached_tokens = cached
        if computed is not None:
            completion.prompt_tokens = computed + cached
    if made is not None:
        completion.output_tokens = made


def take_choice(completion: Completion, choice: Choice, texts: list[str]) -> int:
    """Add one choice's part; returns how many tokens it carried. Text and ids are kept of the first choice alone."""
    text = choice.text or choice_text(choice)
    token_ids = choice.response_token_ids if choice.token_ids is None else choice.token_ids
    if not choice.index:
        texts.append(text)
        if choice.finish_reason:
            completion.finish_reason = choice.finish_reason
        if choice.prompt_token_ids is not None:
            completion.prompt_token_ids = choice.prompt_token_ids
        if token_ids is not None:
            completion.add_token_ids(token_ids)
    if token_ids is not None:
        return len(token_ids)
    return 1 if text or has_unspoken(choice) else 0


class EventStream:
    """Server-sent events of a byte stream that may be cut anywhere; each read gives the events that it completes.

    Lines end in LF, CRLF or CR, an event in an empty line; its data is its ``data:`` lines joined by LF. Comments and
    other fields are skipped, and an event without data is none (WHATWG HTML, section 9.2.6).
    """

    __slots__ = ("_rest", "_swallow_lf")

    def __init__(self) -> None:
        self._rest = bytearray()
        # A CR ends a line at once, so that no event waits for the next read; an LF that follows it belongs to it.
        self._swallow_lf = False

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that end within ``data``, in order; what is left waits for the next read."""
        if self._swallow_lf or data.find(b"\r") >= 0:
            data = self._with_lf(data)
        elif not self._rest and (events := one_line_events(data)):
            return events
        rest = self._rest
        if rest:
            # An event of many reads costs its bytes once: only the new ones, and the last before them, are searched.
            searched = len(rest) - 1
            rest += data
            if rest.find(b"\n\n", searched) < 0:
                return []
            data = bytes(rest)
            rest.clear()
        *blocks, last = data.split(b"\n\n")
        rest += last
        return [event for event in map(event_data, blocks) if event is not None]

    def _with_lf(self, data: bytes) -> bytes:
        if self._swallow_lf and data.startswith(b"\n"):
            data = data[1:]
            self._swallow_lf = False
        if data:
            self._swallow_lf = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def one_line_events(data: bytes) -> list[bytes]:
    """Data of the events of a read without CR; empty if it is more than complete events of one line each."""
    if data[:6] != b"data: " or data[-2:] != b"\n\n":
        return []
    events = data[6:-2].split(b"\n\ndata: ")
    return events if data.count(b"\n") == 2 * len(events) else []


def event_data(block: bytes) -> bytes | None:
    """The data of one event's lines; None for a comment, a keep-alive, or any event without data."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    values = [
        line[5:].removeprefix(b" ") if line != b"data" else b""
        for line in block.split(b"\n")
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(values) if values else None
