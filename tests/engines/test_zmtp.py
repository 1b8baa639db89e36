"""ZeroMQ messages on real sockets, and peers that speak something else."""

import socket
import threading
from collections.abc import Iterator

import pytest

from engines.zmtp import COMMAND, MAX_FRAME_BYTES, ZmtpSocket, frame, parse_endpoint
from tests.kvpublisher import GREETING, Publisher, message
from wire.errors import WireError


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    found = Publisher()
    yield found
    found.close()


def test_a_subscriber_gets_messages_of_any_size(publisher: Publisher) -> None:
    with ZmtpSocket(publisher.endpoint, "SUB", timeout_s=10) as subscriber:
        assert publisher.subscribed.wait(10)
        for number, payload in ((0, b""), (1, b"x" * 255), (2, b"y" * 70_000)):
            publisher.publish(number, payload)
            assert subscriber.receive() == [b"topic", number.to_bytes(8, "big"), payload]


def test_a_dealer_asks_and_is_answered(publisher: Publisher) -> None:
    publisher.kept = [(4, b"four"), (5, b"five")]
    with ZmtpSocket(publisher.replay_endpoint, "DEALER", timeout_s=10) as dealer:
        dealer.send([b"", (5).to_bytes(8, "big")])
        assert dealer.receive() == [b"", b"topic", (5).to_bytes(8, "big"), b"five"]
        assert dealer.receive()[2] == b"\xff" * 8
        with pytest.raises(ConnectionResetError):
            dealer.receive()


READY = frame(b"\x05READY", COMMAND)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), "speaks no ZMTP 3"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32) + READY, "security mechanism"),
        (GREETING + frame(b"\x05ERROR", COMMAND), "refused the connection"),
        (GREETING + READY + b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"), "a ZeroMQ frame of"),
        (GREETING + READY + message([b""] * 70), "more than 64 parts"),
    ],
)
def test_another_peer_is_refused_in_a_line(said: bytes, error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(said)
                while peer.recv(1 << 10):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WireError, match=error), ZmtpSocket(listener.getsockname(), "SUB", timeout_s=10) as peer:
            peer.receive()
        thread.join()


@pytest.mark.parametrize("text", ["tcp://*:5557", "http://host:1", "tcp://host", "tcp://host:70000", "host:5557"])
def test_addresses_that_are_none_are_named(text: str) -> None:
    with pytest.raises(WireError, match=r"expected tcp://HOST:PORT"):
        parse_endpoint(text)
    assert parse_endpoint("tcp://engine-1:5557") == ("engine-1", 5557)
