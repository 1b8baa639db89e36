"""A publisher of KV events on real sockets, as vLLM's is: PUB for live batches, ROUTER for the replay of kept ones."""

import threading
from typing import Any

import zmq

from tests.waiting import wait_until

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Two listening ports, and the batches published so far: a thread answers replays."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, bytes]] = []
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._pub = self._new_pub()
        self._pub.bind("tcp://127.0.0.1:*")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = f"tcp://127.0.0.1:{replay_port}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer_replays, daemon=True)
        self._thread.start()

    def wait_for_subscriber(self) -> None:
        assert self._pub.poll(20_000), "nobody subscribed"
        assert self._pub.recv() == b"\x01"

    def publish(self, number: int, payload: bytes, *, live: bool = True) -> None:
        """Keep a batch, and send it unless it is to get lost."""
        self.kept.append((number, payload))
        if live:
            self._pub.send_multipart([b"topic", number.to_bytes(8, "big"), payload])

    def restart(self) -> None:
        """Close the subscribers' connections, as an engine that dies, and listen again."""
        self._pub.close()
        self._pub = self._new_pub()
        wait_until(self._listens)  # the address is free a moment after the close

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._pub.close()
        self._context.term()

    def _new_pub(self) -> Any:
        made = self._context.socket(zmq.XPUB)  # a PUB that tells of subscriptions
        made.setsockopt(zmq.LINGER, 0)
        return made

    def _listens(self) -> bool:
        try:
            self._pub.bind(self.endpoint)
        except zmq.ZMQError:
            return False
        return True

    def _answer_replays(self) -> None:
        with self._router as router:
            while not self._ended.is_set():
                if not router.poll(20):
                    continue
                client, delimiter, first = router.recv_multipart()
                for number, payload in self.kept:
                    if number >= int.from_bytes(first, "big"):
                        router.send_multipart([client, delimiter, b"topic", number.to_bytes(8, "big"), payload])
                router.send_multipart([client, delimiter, b"", END, b""])
