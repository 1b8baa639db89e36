"""Heads that clients send, and heads that the parser refuses."""

import pytest

from wire.head import FramingError, parse_request_head


def test_client_heads_parse() -> None:
    data = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:8000\r\nAccept-Encoding: gzip, deflate\r\n"
        b"Connection: keep-alive\r\nAuthorization: Bearer x\r\nContent-Length: 12\r\n\r\n"
    )
    head = parse_request_head(data)
    assert (head.method, head.target, head.keep_alive) == (b"POST", b"/v1/chat/completions", True)
    assert head.names == [b"host", b"accept-encoding", b"connection", b"authorization", b"content-length"]
    assert head.headers[-1] == (b"Content-Length", b"12")


@pytest.mark.parametrize(
    "lines",
    [b"Host: a\r\nHost: b\r\n", b"Host: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n", b"Host: a\r\nX : y\r\n", b""],
)
def test_invalid_heads_are_rejected(lines: bytes) -> None:
    with pytest.raises(FramingError):
        parse_request_head(b"GET / HTTP/1.1\r\n" + lines + b"\r\n")


def test_non_ascii_target_is_unchanged() -> None:
    target = "/café?q=".encode() + bytes(range(128, 256))
    head = parse_request_head(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % target)
    assert (head.target, head.names) == (target, [b"host"])
