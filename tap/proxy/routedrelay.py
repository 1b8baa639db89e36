"""Relay that reads the start of a prompt before it chooses the upstream; the bytes pass unchanged."""

import asyncio
from collections.abc import Sequence

from tap.prompts.promptstart import model_name, prompt_start
from tap.proxy.relay import Relay, Relays, TimedRelay
from tap.proxy.upstreams import Assignment, Upstreams, first_value
from wire.requesthead import RequestHead
from wire.server import ClientConnection

WAIT_S = 0.05
"""Longest wait for the start of a prompt; a slow upload is routed by what there is."""


class RoutedRelays(Relays):
    """Relays of a worker with any policy."""

    def _kinds(self) -> tuple[type[Relay], type[Relay]]:
        return (RoutedRelay, TimedRoutedRelay) if self.upstreams.reads_prompt else super()._kinds()


class RoutedRelay(Relay):
    """Relay of a request whose upstream is chosen by its prompt."""

    __slots__ = ("_data", "_lacking_bytes", "_timer")

    def __init__(self, relays: Relays, head: RequestHead, client: ClientConnection) -> None:
        super().__init__(relays, head, client)
        self._data: list[bytes] = []
        """Reads of the body before the choice, without chunk framing."""
        self._lacking_bytes = awaited_bytes(head, relays.upstreams.route_bytes)
        """Bytes of the body until the choice. 0: it is made."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._copy = self._relays.new_copy(self._head, self._assignment.upstream.base_path)
        if not self._lacking_bytes:
            self._choose()
            if not self._client.more_to_come:
                self._send_request()
        elif not self._client.more_to_come:
            self._wait()

    def request_body(self, raw: bytes, data: bytes) -> None:
        if not self._lacking_bytes or self._ended:
            super().request_body(raw, data)
            return
        self._unsent.append(raw)
        self._data.append(data)
        if self._copy is not None:
            self._copy.request_body(data)
        else:
            self._relays.bytes_in += len(data)
        self._lacking_bytes = max(0, self._lacking_bytes - len(data))
        if not self._lacking_bytes:
            self._choose_and_send()
        else:
            self._wait()

    def request_end(self) -> None:
        super().request_end()
        if self._lacking_bytes:
            self._choose_and_send()

    def client_gone(self) -> None:
        self._stop_waiting()
        super().client_gone()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._choose_and_send)

    def _stop_waiting(self) -> None:
        self._lacking_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _choose(self) -> None:
        self._assignment = picked(self._relays.upstreams, self._head, self._data)
        self._data.clear()

    def _choose_and_send(self) -> None:
        self._stop_waiting()
        if not self._ended:
            self._choose()
            self._send_request()


class TimedRoutedRelay(TimedRelay, RoutedRelay):
    """Routed relay that is timed."""

    __slots__ = ()


def picked(upstreams: Upstreams, head: RequestHead, reads: Sequence[bytes]) -> Assignment:
    """Choose an upstream by the start of a body."""
    if not reads:
        return upstreams.pick(head)
    model = model_name(reads, upstreams.route_bytes) if upstreams.loras else None
    keys = prompt_start(reads, upstreams.route_bytes)
    return upstreams.pick(head, keys, adapter=model if model in upstreams.loras else None)


def awaited_bytes(head: RequestHead, most_bytes: int) -> int:
    """Return the bytes of a body to wait for; 0 where none comes, or only after the upstream's word."""
    if b"expect" in head.names:
        return 0
    length = first_value(head, b"content-length")
    if length:
        return min(int(length), most_bytes)
    return most_bytes if b"transfer-encoding" in head.names else 0
