"""Properties that hold for any bytes, from either side."""

import re
from collections.abc import Sequence
from itertools import pairwise

from tests.wire.fuzzedtap import (
    MARKER,
    RequestOutcome,
    ResponseOutcome,
    parse_response,
    send_requests,
    send_response,
)
from tests.wire.strictparser import Request, parse_requests

MARKER_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nmarker"


def pieces(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The stream cut at these places."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(stream)}), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]


def check_requests(stream: bytes, cuts: Sequence[Sequence[int]] = ()) -> RequestOutcome:
    """A client's bytes, and a good request behind them: the upstream reads what the tap read, however they are cut.

    Raises AssertionError where it does not.
    """
    stream += MARKER
    outcome = send_requests([stream])
    reading = parse_requests(stream, skip_empty_lines=True)
    meant = reading.requests
    got = [(request.method, request.target, request.raw_body) for request in outcome.forwarded]
    assert got == [as_forwarded(request) for request in meant[: len(got)]], "other requests than the client's"
    answers = outcome.answers.count(b"HTTP/1.1 ")
    assert answers - len(got) in {0, 1}, "each request has its answer, and at most one is refused"
    if len(got) < len(meant):
        assert not outcome.open, "a request was passed over on a connection that stays"
    if reading.end == "malformed":
        assert not outcome.open, "what is no request is waited for"
    for sample in cuts:
        again = send_requests(pieces(stream, sample))
        assert again == outcome, "what becomes of the bytes depends on how they were cut"
    return outcome


def as_forwarded(request: Request) -> tuple[bytes, bytes, bytes]:
    """Method, target and body as the upstream must get them: of an absolute target, what follows its host."""
    target = request.target
    if target.lower().startswith((b"http://", b"https://")):
        after = target.partition(b"://")[2]
        start = min([at for at in (after.find(b"/"), after.find(b"?")) if at >= 0], default=len(after))
        target = after[start:] if after[start : start + 1] == b"/" else b"/" + after[start:]
    return request.method, target, request.raw_body


def check_response(stream: bytes, cuts: Sequence[Sequence[int]] = (), *, method: bytes = b"GET") -> ResponseOutcome:
    """An upstream's bytes and then its close: whole to the client only where they were, and then its next is in step.

    Raises AssertionError where it is not.
    """
    outcome = _checked(stream, [stream], method)
    for sample in cuts:
        again = _checked(stream, pieces(stream, sample), method)
        assert again == outcome, "what becomes of the bytes depends on how they were cut"
    return outcome


def _checked(stream: bytes, reads: Sequence[bytes], method: bytes) -> ResponseOutcome:
    outcome = send_response([read for read in reads if read], method=method)
    if outcome.complete:
        assert parse_response(outcome.raw, method=method, closed=False) == ("whole", b""), (
            "not whole, or more than that"
        )
        assert outcome.next_answer == MARKER_ANSWER, "the next request got another answer than its own"
        return outcome
    seen, _ = parse_response(outcome.raw, method=method, closed=True)
    if seen == "whole" and not outcome.was_cut:
        # Empty lines before a head: the tap passes over them, and h11 does not.
        meant = re.sub(rb"(\n\r?\n)[\r\n]+(?=HTTP/)", rb"\1", stream.lstrip(b"\r\n"))
        assert parse_response(meant, method=method, closed=True)[0] == "whole", "a cut response looks whole"
    return outcome
