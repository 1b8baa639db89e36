"""Parser of completion responses, and the only rule for token arrival: TTFT (first token) and ITL derive from it.

A token arrives with the socket read that completes its SSE event. An event carries tokens if a choice has token ids, or
non-empty text, content, reasoning or tool-call arguments (``add_choice``). The opening event of a chat stream, which
has only the role, and the final usage event carry no token. The first read with a token is the first token: TTFT =
``first_token_ns`` - request arrival (``parse_stream``). Parsers of other APIs follow this rule (``wire/answer.py``).

Tokens of a read: its token ids if the engine sends them, else one token for each event and choice. If usage reports far
more tokens (an engine that sends several tokens an event) or fewer, the tokens are distributed over the reads in
proportion to their events. A few additional tokens count for the first read: tokens without text, as the stop token.
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
    has_reasoning_or_tool_call,
    token_count,
)
from wire.jsonsize import LARGE_BYTES, fits_in_memory

WITHOUT_TEXT = 2
"""Output tokens in usage that no event may show: the stop token, a token within a UTF-8 character."""


class Completion(msgspec.Struct):
    """Tokens, usage and times of a response. Text and token ids stay in memory: kvtape never writes or logs them."""

    first_token_ns: int | None = None
    """Arrival of the first token, for TTFT. None: no token arrived, or the response was not streamed."""
    gaps_ns: list[int] = []
    """Inter-token latency (ITL): time from each read with tokens to the next."""
    gap_tokens: list[int] = []
    """Tokens that arrived at the end of each gap."""
    first_tokens: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """Output tokens of the usage. None: no usage; ``streamed_tokens`` is then the estimate."""
    cached_tokens: int | None = None
    """Cached prompt tokens. None: not reported; 0: no prefix hit."""
    prompt_parts: dict[str, int] = {}
    """Prompt tokens by part (uncached, cache read, cache write), if the usage has parts."""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    """Output token ids of the first choice. None: the engine did not send them."""
    prompt_token_ids: list[int] | None = None
    text: str = ""
    """Output text of the first choice, without reasoning and tool calls."""
    model: str | None = None
    done: bool = False
    """True: the response is complete, by ``[DONE]`` or a complete body."""
    error_kind: str | None = None
    """``stream_error``: the engine reported an error in the response; ``unparseable``: invalid response."""

    @property
    def streamed_tokens(self) -> int:
        return self.first_tokens + sum(self.gap_tokens)

    def add_token_ids(self, ids: Sequence[int]) -> None:
        self.token_ids = self.token_ids or []
        self.token_ids += ids


EventParser = Callable[[Completion, bytes, list[str]], int]
"""Adds the data of an event (or a complete body) to the completion and its text to the list; returns the number of
tokens that arrived with the event. Raises one of ``UNREADABLE`` for invalid data."""


def parse_completions_event(completion: Completion, data: bytes, texts: list[str]) -> int:
    """Parse an event of OpenAI's completions and chat completions; return its number of tokens."""
    return add_event(completion, decode_event(data), texts)


def parse_stream(reads: Sequence[tuple[int, bytes]], parse_event: EventParser = parse_completions_event) -> Completion:
    """Parse a stream of (arrival time in ns, bytes) reads; set ``first_token_ns`` for TTFT and ``gaps_ns`` for ITL."""
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
                    tokens += parse_event(completion, data, texts)
            except UNREADABLE:
                completion.error_kind = "unparseable"
        if tokens == 0:
            continue
        if last_token_ns is None:  # the first token arrived with this read: TTFT
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
    """Distribute the output tokens of the usage over the reads, if events were counted instead of token ids."""
    streamed, output = completion.streamed_tokens, completion.output_tokens
    if output is None or streamed == 0 or completion.token_ids is not None:
        return
    if streamed <= output <= streamed + max(WITHOUT_TEXT, streamed // 10):
        completion.first_tokens = output - sum(completion.gap_tokens)
        return
    events, assigned = 0, 0
    shares: list[int] = []
    for count in (completion.first_tokens, *completion.gap_tokens):
        events += count
        shares.append(-(-events * output // streamed) - assigned)  # rounded up, so that the first read has a token
        assigned += shares[-1]
    completion.first_tokens, completion.gap_tokens = shares[0], shares[1:]


def parse_body(body: bytes, parse_event: EventParser = parse_completions_event) -> Completion:
    """Parse a response that was not streamed: token counts, without token arrival times."""
    completion = Completion()
    texts: list[str] = []
    try:
        parse_event(completion, body, texts)
    except UNREADABLE:
        return Completion(error_kind="unparseable")
    completion.text = "".join(texts)
    completion.done = True
    return completion


def add_event(completion: Completion, event: Event, texts: list[str]) -> int:
    """Add an event to the completion; return the number of tokens that arrived with the event."""
    if event.error is not None or event.object == "error":
        completion.error_kind = "stream_error"
    if event.model is not None:
        completion.model = event.model
    if event.prompt_token_ids is not None:
        completion.prompt_token_ids = event.prompt_token_ids
    if event.timings is not None:
        add_timings(completion, event.timings)
    if (usage := event.usage) is not None:
        add_usage(completion, usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details)
    tokens = 0
    for choice in event.choices or ():
        tokens += add_choice(completion, choice, texts)
    return tokens


def add_usage(completion: Completion, prompt: int | None, output: int | None, details: TokensDetails | None) -> None:
    """Set prompt, output and cached tokens. The last usage is final: some engines send a growing usage per event."""
    completion.prompt_tokens, completion.output_tokens = token_count(prompt), token_count(output)
    if details is not None:
        completion.cached_tokens = token_count(details.cached_tokens)


def add_timings(completion: Completion, timings: Timings) -> None:
    """Set the token counts of llama.cpp's ``timings``, sent without usage. Usage of the same event has precedence."""
    cached, computed = token_count(timings.cache_n), token_count(timings.prompt_n)
    if cached is not None:
        completion.cached_tokens = cached
        if computed is not None:
            completion.prompt_tokens = computed + cached
    if (generated := token_count(timings.predicted_n)) is not None:
        completion.output_tokens = generated


def add_choice(completion: Completion, choice: Choice, texts: list[str]) -> int:
    """Add a choice; return its number of tokens: its token ids, else 1 for text, reasoning or a tool call, else 0."""
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
    return 1 if text or has_reasoning_or_tool_call(choice) else 0


class EventStream:
    """Incremental parser of server-sent events; each read yields the events, and so the tokens, that it completes.

    Lines end in LF, CRLF or CR, an event ends in an empty line; its data is its ``data:`` lines joined by LF. Comments,
    other fields and events without data are skipped (WHATWG HTML, section 9.2.6).
    """

    __slots__ = ("_pending", "_swallow_lf")

    def __init__(self) -> None:
        self._pending = bytearray()
        # A CR ends a line at once, so that no token waits for the next read; a following LF belongs to the CR.
        self._swallow_lf = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that end within ``data``; an incomplete event waits for the next read."""
        if self._swallow_lf or data.find(b"\r") >= 0:
            data = self._with_lf(data)
        elif not self._pending and (events := single_line_events(data)):
            return events
        pending = self._pending
        if pending:
            # Search only the new bytes and the last byte before them: an event of many reads is scanned once.
            searched = len(pending) - 1
            pending += data
            if pending.find(b"\n\n", searched) < 0:
                return []
            data = bytes(pending)
            pending.clear()
        *blocks, last = data.split(b"\n\n")
        pending += last
        return [event for event in map(event_data, blocks) if event is not None]

    def _with_lf(self, data: bytes) -> bytes:
        if self._swallow_lf and data.startswith(b"\n"):
            data = data[1:]
            self._swallow_lf = False
        if data:
            self._swallow_lf = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def single_line_events(data: bytes) -> list[bytes]:
    """Return the data of a read that consists of complete one-line events without CR; empty: another form."""
    if data[:6] != b"data: " or data[-2:] != b"\n\n":
        return []
    events = data[6:-2].split(b"\n\ndata: ")
    return events if data.count(b"\n") == 2 * len(events) else []


def event_data(block: bytes) -> bytes | None:
    """Return the data of an event; None: a comment, a keep-alive, or an event without data."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    values = [
        line[5:].removeprefix(b" ") if line != b"data" else b""
        for line in block.split(b"\n")
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(values) if values else None
