"""The reference server: it answers as it was asked, and what it tells of that is true."""

import http.client
import itertools
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from scripts.loadbench.reference_server import Pace, Served, ServerProcess, reference_server, stream_pieces, token_ids
from wire.answer import parse_answer
from wire.completion import BodyRead

PACED = Pace(ttft_low_ms=1.0, ttft_high_ms=4.0, gap_ms=0.5, tokens_per_write=2, prompt_tokens=7)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with reference_server(PACED) as running:
        yield running


def connect(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port or 0), timeout=10)


def ask(server: ServerProcess, request_id: str | None, tokens: int, *, path: str = "/v1/completions") -> bytes:
    """The body of an answer, de-chunked by the standard library."""
    client = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    headers = {} if request_id is None else {"X-Request-ID": request_id}
    client.request("POST", path, json.dumps({"prompt": [5, 6], "max_tokens": tokens}), headers)
    answer = client.getresponse().read()
    client.close()
    return answer


def served(server: ServerProcess, request_id: str) -> Served:
    (found,) = [one for one in server.log().served if one.request_id == request_id]
    return found


def test_an_answer_is_as_long_as_was_asked_and_its_tokens_are_known(server: ServerProcess) -> None:
    completion = parse_answer("/v1/completions", [BodyRead(1, ask(server, "known", 5))], stream=True)
    assert completion.token_ids == list(token_ids(5)) == [1000, 1001, 1002, 1003, 1004]
    assert (completion.prompt_tokens, completion.output_tokens) == (7, 5)
    assert (completion.done, completion.finish_reason, completion.text) == (True, "length", " t0 t1 t2 t3 t4")


def test_the_truth_lies_between_what_the_client_can_know(server: ServerProcess) -> None:
    before_ns = time.perf_counter_ns()
    ask(server, "between", 5)
    after_ns = time.perf_counter_ns()
    truth = served(server, "between")
    assert truth.first_write_ns is not None
    assert truth.last_write_ns is not None
    assert before_ns < truth.received_ns < truth.first_write_ns < truth.last_write_ns < after_ns
    # One event, then two writes of two.
    assert (truth.tokens, truth.writes) == (5, 3)


def test_both_sides_know_a_request_s_ttft_from_its_id(server: ServerProcess) -> None:
    for name in ("a", "b", "c"):
        ask(server, name, 1)
        truth = served(server, name)
        assert truth.due_ns - truth.received_ns == PACED.ttft_ns(name)
        # It is never early, and no test can say how late it may be.
        assert truth.first_write_ns is not None
        assert truth.first_write_ns >= truth.due_ns
    drawn = [PACED.ttft_ns(str(number)) for number in range(500)]
    assert 1_000_000 <= min(drawn) < 1_050_000
    assert 3_950_000 < max(drawn) <= 4_000_000


def test_a_request_may_come_in_pieces_and_without_an_id(server: ServerProcess) -> None:
    body = b'{"max_tokens": 3, "prompt": "' + b"x" * 4000 + b'"}'
    request = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    before = len(server.log().served)
    with connect(server) as client:
        for start, end in itertools.pairwise([0, 9, 50, 80, 2000, len(request)]):
            client.sendall(request[start:end])
            time.sleep(0.005)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += client.recv(65536)
    assert answer.count(b"token_ids") == 3
    truth = server.log().served[before]
    assert (truth.request_id, truth.tokens) == (f"#{before}", 3)


def test_a_client_that_leaves_is_served_no_further(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(b'POST / HTTP/1.1\r\nX-Request-Id: left\r\nContent-Length: 20\r\n\r\n{"max_tokens": 9000}')
        client.recv(100)
    while served(server, "left").first_write_ns is None:
        time.sleep(0.01)
    assert served(server, "left").last_write_ns is None


def test_everything_at_once_is_still_in_pieces() -> None:
    pieces = stream_pieces(Pace(tokens_per_write=16), 40)
    assert [piece.count(b"token_ids") for piece in pieces] == [1, 16, 16, 7]
    assert pieces[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert [piece.count(b"token_ids") for piece in stream_pieces(Pace(), 1)] == [1]
