"""The embedded engine's own HTTP, byte by byte over real sockets: framing, limits, leaving, draining."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests.warmstart import WarmPopen

StartSimServer = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="module")
def url(start_sim_server: StartSimServer) -> Iterator[str]:
    with start_sim_server("--speed", "max", "--num-gpu-blocks", "2048", "--block-size", "16") as address:
        yield address


def connect(url: str) -> socket.socket:
    parsed = httpx.URL(url)
    return socket.create_connection((parsed.host, parsed.port or 0), timeout=30)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nLong: " + b"x" * 70_000, b"431"),
        (post(b"").replace(b": 0", b": 99999999"), b"413"),
        (b"GET /nothing?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"404"),
    ],
    ids=["two framings", "long head", "large body", "path"],
)
def test_rejected_requests(url: str, request_bytes: bytes, status: bytes) -> None:
    with connect(url) as sock:
        with contextlib.suppress(ConnectionError):  # a refused request need not be read completely
            sock.sendall(request_bytes)
            if b"99999999" in request_bytes:
                sock.sendall(b"x" * 68_000_000)
        response = b""
        with contextlib.suppress(ConnectionError):
            response = sock.recv(200)
    assert response.split(b" ")[1:2] == [status]
    assert httpx.get(f"{url}/health").status_code == 200


def running(client: httpx.Client) -> float:
    """How many requests the engine runs."""
    match = re.search(r"^vllm:num_requests_running{\S* (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert match is not None
    return float(match[1])


def test_slow_reader_is_bounded_and_complete(url: str) -> None:
    """The output waits as token ids; the late reader receives the same text in fewer events."""
    body = {"prompt": [1] * 9, "max_tokens": 20_000, "ignore_eos": True, "return_token_ids": True}
    host = httpx.URL(url)
    with socket.socket() as sock, httpx.Client(base_url=url, timeout=60) as client:
        sock.settimeout(30)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.connect((host.host, host.port or 0))
        sock.sendall(post(json.dumps({**body, "stream": True}).encode(), b"Connection: close"))
        assert sock.recv(15) == b"HTTP/1.1 200 OK"
        while running(client):
            pass  # the engine continues to the end of the output
        expected = client.post("/v1/completions", json=body).json()["choices"][0]
        stream = read_all(sock)
    chunks = [json.loads(ids) for ids in re.findall(rb',"token_ids":(\[[\d,]*\])', stream)]
    assert [token_id for ids in chunks for token_id in ids] == expected["token_ids"]
    assert max(map(len, chunks)) > 100
    assert stream.endswith(b"0\r\n\r\n")


def test_sigterm_drains() -> None:
    command = [sys.executable, "-m", "sim", "serve", "--listen", "127.0.0.1:0", "--t0-ms", "20", "--drain", "20s"]
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[4]
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30.0) as response:
            events = response.iter_text()
            text = next(events)
            server.send_signal(signal.SIGTERM)
            text += "".join(events)
        assert text.endswith("data: [DONE]\n\n")
        _, complaints = server.communicate(timeout=20)
        assert (server.returncode, complaints) == (0, "")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def cut_off(number: signal.Signals, *flags: str) -> Any:
    """End a server with a stream open; how it ended for the client, and for itself."""
    command = [sys.executable, "-m", "sim", "serve", "--listen", "127.0.0.1:0", *flags]
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[4]
        body = {"prompt": "x", "max_tokens": 10_000, "ignore_eos": True, "stream": True}
        outcome = None
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30.0) as response:
            events = response.iter_bytes()
            next(events)
            server.send_signal(number)
            try:
                for _ in events:
                    pass
            except httpx.RemoteProtocolError as error:
                outcome = type(error)
        _, complaints = server.communicate(timeout=20)
        return outcome, server.returncode, complaints


@pytest.mark.parametrize(("number", "flags"), [(signal.SIGTERM, ("--drain", "0.2s")), (signal.SIGINT, ())])
def test_truncated_output_is_visible(number: signal.Signals, flags: tuple[str, ...]) -> None:
    assert cut_off(number, *flags) == (httpx.RemoteProtocolError, 0, "")
