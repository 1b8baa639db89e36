"""A usual head, read by its compiled form, is what the parser makes of it. Without a compiler all are the parser's."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wire.framing import FramingError
from wire.requesthead import RequestHead, parse_request_head, parsed_head, take_usual_head, usual_head

NAMES = ["Host", "Content-Length", "Transfer-Encoding", "Connection", "Upgrade", "X-A", "Content_Length", "Expect"]
NAME = st.sampled_from([*NAMES, "X A", "X" * 70, ""])
VALUES = ["a", "a:1", "12", "0012", "1" * 16, "+3", "1,1", "keep-alive", "close", "websocket", "chunked", "é"]
VALUE = st.sampled_from([*VALUES, " a", "a ", "", "\t", "a\x7f", "a b", "\x00", "a\rb"])
LINE = st.tuples(NAME, st.sampled_from([": ", ":", ":  ", " : "]), VALUE, st.sampled_from(["\r\n"] * 6 + ["\n"]))
TARGET = st.sampled_from(["/", "/v1/completions?a=b", "/a b", "*", "http://h/", "/é", "/a#b", '/"', "a", "/%0d", "//"])
METHOD = st.sampled_from(["POST", "GET", "post", "OPTIONS", "CONNECT", "GETS"])
VERSION = st.sampled_from(["HTTP/1.1"] * 3 + ["HTTP/1.0", "HTTP/2.0", " HTTP/1.1"])


def told(head: RequestHead) -> RequestHead:
    return msgspec.structs.replace(head, at_ns=0)


START = st.tuples(METHOD, TARGET, VERSION).map(" ".join)


@given(START, st.lists(LINE, max_size=4), st.booleans(), st.sampled_from(["\r\n", "\n", "\r\n\r\n"]))
@example("POST /v1/completions HTTP/1.1", [("Content-Length", ": ", "12", "\r\n")], True, "\r\n")
def test_a_usual_head_is_read_as_the_parser_reads_it(
    start: str, lines: list[tuple[str, str, str, str]], hosted: bool, end: str
) -> None:
    host = "Host: h\r\n" if hosted else ""
    data = (f"{start}\r\n{host}" + "".join(map("".join, lines)) + end).encode()
    if usual_head(data) is not None:
        assert told(parse_request_head(data)) == told(parsed_head(data, 0))


def test_what_clients_send_is_usual() -> None:
    data = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:8000\r\nAccept-Encoding: gzip, deflate\r\n"
        b"Connection: keep-alive\r\nAuthorization: Bearer x\r\nContent-Length: 12\r\n\r\n"
    )
    assert (usual_head(data) is not None) == (usual_head is not take_usual_head)
    head = parse_request_head(data)
    assert (head.method, head.target, head.keep_alive) == (b"POST", b"/v1/chat/completions", True)
    assert head.names == [b"host", b"accept-encoding", b"connection", b"authorization", b"content-length"]
    assert head.headers[-1] == (b"Content-Length", b"12")
    assert told(head) == told(parsed_head(data, 0))


@pytest.mark.parametrize(
    "lines",
    [b"Host: a\r\nHost: b\r\n", b"Host: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n", b"Host: a\r\nX : y\r\n", b""],
)
def test_a_head_that_the_parser_refuses_is_refused(lines: bytes) -> None:
    with pytest.raises(FramingError):
        parse_request_head(b"GET / HTTP/1.1\r\n" + lines + b"\r\n")


def test_a_target_beyond_ascii_stays_as_it_came() -> None:
    target = "/café?q=".encode() + bytes(range(128, 256))
    head = parse_request_head(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % target)
    assert (head.target, head.names) == (target, [b"host"])
