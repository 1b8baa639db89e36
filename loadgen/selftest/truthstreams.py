"""The built-in server's answers, made once: each piece is bytes that only need to be written.

Events look like vLLM's. Token i of every answer has the id ``FIRST_ID + i``, so that a client's hashes of the answer
show whether it lost, repeated or reordered anything.
"""

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from loadgen.selftest.truth import Pace

FIRST_ID = 1000
MODEL = "truth"

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@lru_cache(maxsize=256)
def stream_pieces(pace: Pace, tokens: int, *, chat: bool) -> tuple[bytes, ...]:
    """A whole response in the pieces that are written one by one; the first has the head and the first token."""
    events = [_event(index, last=index == tokens - 1, chat=chat) for index in range(tokens)]
    step = pace.tokens_per_write
    pieces = [HEAD + events[0], *(b"".join(events[at : at + step]) for at in range(1, tokens, step))]
    pieces[-1] += _usage(pace.prompt_tokens, tokens) + END
    return tuple(pieces)


def token_ids(tokens: int) -> Iterable[int]:
    """The ids of an answer of so many tokens."""
    return range(FIRST_ID, FIRST_ID + tokens)


def _event(index: int, *, last: bool, chat: bool) -> bytes:
    said = {"delta": {"content": f" t{index}"}} if chat else {"text": f" t{index}"}
    choice = {
        "index": 0,
        **said,
        "logprobs": None,
        "finish_reason": "length" if last else None,
        "stop_reason": None,
        "token_ids": [FIRST_ID + index],
    }
    return _chunk({**_envelope(chat=chat), "choices": [choice], "usage": None})


def _usage(prompt_tokens: int, tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}
    return _chunk({**_envelope(chat=False), "choices": [], "usage": usage})


def _envelope(*, chat: bool) -> dict[str, object]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": kind, "created": 1_700_000_000, "model": MODEL}


def _chunk(event: dict[str, object]) -> bytes:
    data = b"data: " + msgspec.json.encode(event) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)
