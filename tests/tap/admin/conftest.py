"""A real admin process: started as the supervisor does, fed as workers and the recorder do."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tap.ipc.exchange import AdminSetup, Ready, ServiceStats, encode_frame
from tap.ipc.feed import FeedSender
from tests.warmstart import WarmPopen
from wire.process import split_frames

ROOT = Path(__file__).parents[3]


@dataclass
class AdminProcess:
    """The process and the two ways to tell it things."""

    control: socket.socket
    process: "subprocess.Popen[bytes]"
    sender: FeedSender
    url: str

    def tell(self, stats: ServiceStats) -> None:
        self.control.sendall(encode_frame(stats))

    def push(self, message: msgspec.Struct) -> None:
        assert self.sender.offer(encode_frame(message))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def live(self) -> Any:
        return self.get("/live.json").json()

    def live_once(self, wanted: str, value: object) -> Any:
        """The snapshot, once the value at a dotted path is this one; what is pushed is shown a moment later."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            live = found = self.live()
            for step in wanted.split("."):
                found = found[int(step)] if step.isdigit() else found[step]
            if found == value:
                return live
            time.sleep(0.1)
        raise AssertionError(f"{wanted} stayed {found!r}")


def start_admin(folder: Path) -> AdminProcess:
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        port = listener.getsockname()[1]
        process = WarmPopen(
            [sys.executable, "-P", "-m", "tap.admin", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), listener.fileno()),
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        feed_socket = str(folder / "admin.sock")
        setup = AdminSetup(
            listen_fd=listener.fileno(),
            feed_socket=feed_socket,
            trace="captured.jsonl",
        )
        ours.sendall(encode_frame(setup))
        buffer = bytearray()
        while not (frames := split_frames(buffer)):
            buffer += ours.recv(1 << 16)
    assert msgspec.msgpack.decode(frames[0], type=Ready) == Ready()
    return AdminProcess(ours, process, FeedSender(feed_socket), f"http://127.0.0.1:{port}")


@pytest.fixture
def admin() -> Iterator[AdminProcess]:
    """One for the length of a test; at its end it leaves by itself, saying nothing."""
    with tempfile.TemporaryDirectory() as folder:  # a unix socket's path is short
        found = start_admin(Path(folder))
        yield found
        found.sender.close()
        found.control.close()
        _, complaints = found.process.communicate(timeout=30)
        assert (found.process.returncode, complaints) == (0, b"")
