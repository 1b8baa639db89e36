"""A publisher of KV events on real sockets, as vLLM's is: PUB for live batches, ROUTER for the replay of kept ones."""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from engines.zmtp import COMMAND, LONG, MORE, frame

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(48)
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Two listening ports, and the batches published so far: threads answer whoever connects."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, bytes]] = []
        self.subscribed = threading.Event()
        self._subscribers: list[socket.socket] = []
        self._pub, self._router = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        self._threads = [
            threading.Thread(target=self._accept, args=(listener, serve), daemon=True)
            for listener, serve in ((self._pub, self._serve_subscriber), (self._router, self._serve_replay))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def endpoint(self) -> tuple[str, int]:
        return ("127.0.0.1", int(self._pub.getsockname()[1]))

    @property
    def replay_endpoint(self) -> tuple[str, int]:
        return ("127.0.0.1", int(self._router.getsockname()[1]))

    def publish(self, number: int, payload: bytes, *, live: bool = True) -> None:
        """Keep a batch, and send it unless it is to get lost."""
        self.kept.append((number, payload))
        for peer in self._subscribers if live else ():
            peer.sendall(message([b"topic", number.to_bytes(8, "big"), payload]))

    def cut(self) -> None:
        """Close the subscribers' connections, as an engine that dies."""
        self.subscribed.clear()
        for peer in self._subscribers:
            peer.close()
        self._subscribers.clear()

    def close(self) -> None:
        self.cut()
        for listener in (self._pub, self._router):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self, listener: socket.socket, serve) -> None:  # type: ignore[no-untyped-def]
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError, IndexError):
                peer.sendall(GREETING + frame(b"\x05READY\x0bSocket-Type\0\0\0\x03PUB", COMMAND))
                assert read_exactly(peer, 64)[10] == 3
                read_message(peer)  # READY
                serve(peer)

    def _serve_subscriber(self, peer: socket.socket) -> None:
        assert read_message(peer) == [b"\x01"]
        self._subscribers.append(peer)
        self.subscribed.set()

    def _serve_replay(self, peer: socket.socket) -> None:
        delimiter, first = read_message(peer)
        for number, payload in self.kept:
            if number >= int.from_bytes(first, "big"):
                peer.sendall(message([delimiter, b"topic", number.to_bytes(8, "big"), payload]))
        peer.sendall(message([delimiter, b"", END, b""]))
        peer.close()


def message(parts: Sequence[bytes]) -> bytes:
    return b"".join(frame(part, MORE if place < len(parts) - 1 else 0) for place, part in enumerate(parts))


def read_message(peer: socket.socket) -> list[bytes]:
    parts, more = [], True
    while more:
        flags = read_exactly(peer, 1)[0]
        size = int.from_bytes(read_exactly(peer, 8 if flags & LONG else 1), "big")
        parts.append(read_exactly(peer, size))
        more = bool(flags & MORE)
    return parts


def read_exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        read = peer.recv(count - len(data))
        if not read:
            raise ConnectionResetError
        data += read
    return data
