"""Calls to engines that respond without end, over real sockets: bounded bytes, one deadline, and a clear error."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import trustme

from engines.access import Access
from engines.calls import BlockingCalls, CallError, max_page_bytes
from engines.facts import MAX_METRICS, describe_engine, parse_metrics
from tracefile.records.schema import Engine
from wire.tls import Tls

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNK = b"10000\r\n" + b"vllm:x 1\n" * 7281 + b"vllm:x\n" + b"\r\n"


def endless_body(sock: socket.socket) -> Iterator[bytes]:
    yield HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    while True:
        yield CHUNK


def endless_head(sock: socket.socket) -> Iterator[bytes]:
    yield HEAD
    for number in count():
        yield b"X-%d: y\r\n" % number


def endless_informational(sock: socket.socket) -> Iterator[bytes]:
    while True:
        yield b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100


def slow_body(sock: socket.socket) -> Iterator[bytes]:
    yield HEAD + b"Content-Length: 1000000\r\n\r\n"
    while not _hung_up(sock):
        yield b"x"


def _hung_up(sock: socket.socket) -> bool:
    sock.settimeout(0.02)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False


@contextmanager
def engine(response: Callable[[socket.socket], Iterator[bytes]]) -> Iterator[str]:
    """Serve the response to each connection until its client hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def respond(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            sock.recv(1 << 16)
            for piece in response(sock):
                sock.sendall(piece)

    def accept() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threading.Thread(target=respond, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
def test_endless_body_is_read_up_to_the_limit(path: str) -> None:
    with engine(endless_body) as url, BlockingCalls(url, 30.0) as caller:
        with pytest.raises(CallError, match=f"beyond {max_page_bytes(path)} bytes") as caught:
            caller.get(path)
        [reply] = [entry.locals["reply"] for entry in caught.traceback if "reply" in entry.locals]
        assert not reply._body, "what was read is let go at once, whoever holds the error"
        with pytest.raises(CallError, match="beyond"):
            caller.post("/tokenize", b"{}")


@pytest.mark.parametrize("response", [slow_body, endless_head, endless_informational])
def test_endless_response_stops_at_the_deadline(
    response: Callable[[socket.socket], Iterator[bytes]],
) -> None:
    with engine(response) as url, BlockingCalls(url, 0.2) as caller, pytest.raises(CallError):
        caller.get("/metrics")


def test_a_connection_serves_several_calls() -> None:
    connections = []

    def complete(sock: socket.socket) -> Iterator[bytes]:
        connections.append(sock)
        while True:
            yield HEAD + b"Content-Length: 2\r\n\r\nok"
            if not sock.recv(1 << 16):
                return

    with engine(complete) as url, BlockingCalls(url, 5.0) as caller:
        assert [caller.get("/version").text for _ in range(3)] == ["ok"] * 3
    assert len(connections) == 1


def test_client_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("me@example.org").private_key_and_cert_chain_pem.write_to_path(tmp_path / "me.pem")
    ca, me = str(tmp_path / "ca.pem"), str(tmp_path / "me.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def respond() -> None:
        for _ in range(2):
            sock, _ = listener.accept()
            with context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False) as secure:
                try:
                    secure.do_handshake()
                except ssl.SSLError:
                    with suppress(OSError):
                        socket.socket.recv(secure, 1 << 16)  # a reset would overtake the alert
                    continue
                heads.append(secure.recv(1 << 16))
                secure.sendall(HEAD + b"Content-Length: 2\r\n\r\nok")

    thread = threading.Thread(target=respond)
    thread.start()
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/base"
    with BlockingCalls(url, 10.0, Access(((b"X-Key", b"k"),), Tls(ca, me))) as caller:
        assert caller.get("/version").text == "ok"
    assert heads[0].startswith(b"GET /base/version HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX-Key: k\r\n" in heads[0]
    with BlockingCalls(url, 10.0, Access((), Tls(ca))) as caller, pytest.raises(CallError) as error:
        caller.get("/version")
    assert str(error.value) == "TLS: the server refused after the handshake; expected a valid --cert and --key"
    thread.join()
    listener.close()


def test_parsing_metrics_is_linear_and_bounded() -> None:
    many = parse_metrics("".join(f"name_{number} 1\n" for number in range(MAX_METRICS + 5)) + "name_0 2\n")
    assert len(many) == MAX_METRICS
    assert many["name_0"].value == 3
    word = "w" * 1_000_000
    labels = parse_metrics(f'vllm:cache_config_info{{{word},block_size="16"}} 1.0\nvllm:x NaN\nvllm:y +Inf\n')
    assert describe_engine("", labels, "") == Engine(name="vllm", block_size=16)
