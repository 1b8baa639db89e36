"""The embedded engine's own HTTP, byte by byte over real sockets: framing, limits, leaving, draining."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests.warmstart import WarmPopen

StartSimServer = Callable[..., AbstractContextManager[str]]
ONE = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "ignore_eos": True}).encode()


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


def exchange(url: str, data: bytes) -> bytes:
    """Everything that is answered until the server closes."""
    with connect(url) as sock:
        sock.sendall(data)
        return read_all(sock)


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def test_pipelined_requests_are_answered_in_their_order(url: str) -> None:
    bodies = [json.dumps({"prompt": [9] * length, "max_tokens": 1}).encode() for length in (5, 6, 7)]
    requests = [post(body) for body in bodies[:-1]] + [post(bodies[-1], b"Connection: close")]
    answer = exchange(url, b"".join(requests))
    assert re.findall(rb'"prompt_tokens":(\d+)', answer) == [b"5", b"6", b"7"]


def test_a_large_body_is_no_large_head_for_what_follows(url: str) -> None:
    large = json.dumps({"prompt": [9] * 5, "max_tokens": 1, "padding": "x" * 90_000}).encode()
    after = post(ONE, b"Connection: close")
    with connect(url) as sock:
        sock.sendall(post(large) + after[:20])
        assert sock.recv(15) == b"HTTP/1.1 200 OK"
        sock.sendall(after[20:])
        assert b"HTTP/1.1 200 OK" in read_all(sock)


def test_a_request_may_come_a_byte_at_a_time_and_its_body_in_chunks(url: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (ONE[:9], ONE[9:])) + b"0\r\n\r\n"
    with connect(url) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head + body:
            sock.sendall(bytes([byte]))
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_large_body_may_be_asked_about_first(url: str) -> None:
    with connect(url) as sock:
        sock.sendall(post(b"", b"Expect: 100-continue", b"Connection: close").replace(b": 0", b": %d" % len(ONE)))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(ONE)
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_old_client_gets_its_stream_unchunked(url: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()
    head, _, events = exchange(url, post(body).replace(b"HTTP/1.1", b"HTTP/1.0")).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_another_protocol_is_not_taken_up(url: str) -> None:
    answer = exchange(url, post(ONE, b"Connection: upgrade, close", b"Upgrade: h2c"))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nLong: " + b"x" * 70_000, b"431"),
        (post(b"").replace(b": 0", b": 99999999"), b"413"),
        (b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"405"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"405"),
        (b"GET /nothing?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"404"),
    ],
    ids=["nonsense", "two framings", "bad chunk", "long head", "large body", "method", "method of a page", "path"],
)
def test_what_is_refused(url: str, request_bytes: bytes, status: bytes) -> None:
    with connect(url) as sock:
        with contextlib.suppress(ConnectionError):  # it need not read all of what it refuses
            sock.sendall(request_bytes)
            if b"99999999" in request_bytes:
                sock.sendall(b"x" * 68_000_000)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = sock.recv(200)
    assert answer.split(b" ")[1:2] == [status]
    assert httpx.get(f"{url}/health").status_code == 200


def running(client: httpx.Client) -> float:
    """How many requests the engine runs."""
    found = re.search(r"^vllm:num_requests_running{\S* (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_reader_that_stops_costs_little_and_loses_nothing(url: str) -> None:
    """Its answer waits as token ids; what it reads later is the same text in fewer events."""
    body = {"prompt": [1] * 9, "max_tokens": 20_000, "ignore_eos": True, "return_token_ids": True}
    host = httpx.URL(url)
    with socket.socket() as sock, httpx.Client(base_url=url, timeout=60) as client:
        sock.settimeout(30)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.connect((host.host, host.port or 0))
        sock.sendall(post(json.dumps({**body, "stream": True}).encode(), b"Connection: close"))
        assert sock.recv(15) == b"HTTP/1.1 200 OK"
        while running(client):
            pass  # the engine goes on to the answer's end
        whole = client.post("/v1/completions", json=body).json()["choices"][0]
        stream = read_all(sock)
    found = [json.loads(ids) for ids in re.findall(rb',"token_ids":(\[[\d,]*\])', stream)]
    assert [token_id for ids in found for token_id in ids] == whole["token_ids"]
    assert max(map(len, found)) > 100
    assert stream.endswith(b"0\r\n\r\n")


def test_two_hundred_clients_that_leave_free_every_block(start_sim_server: StartSimServer) -> None:
    flags = ("--t0-ms", "100", "--num-gpu-blocks", "40000", "--block-size", "16", "--max-num-seqs", "256")
    body = json.dumps({"prompt": "x", "max_tokens": 9000, "ignore_eos": True, "stream": True}).encode()
    with start_sim_server(*flags) as url, httpx.Client(base_url=url, timeout=30) as client:
        socks = [connect(url) for _ in range(200)]
        for sock in socks:
            sock.sendall(post(body))
        for sock in socks:
            while b'"text"' not in sock.recv(65536):
                pass
        assert running(client) == 200
        for sock in socks:
            sock.close()
        while running(client):
            pass
        text = client.get("/metrics").text
    assert re.search(r"^vllm:kv_cache_usage_perc\S* 0\.0$", text, re.MULTILINE)
    assert re.search(r'^vllm:request_success_total\S*"abort"\S* 200\.0$', text, re.MULTILINE)


def test_sigterm_lets_answers_end_and_takes_no_more() -> None:
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


def wait_until_refused(url: str) -> None:
    """Return once the server takes no new connection: it has begun to drain."""
    with contextlib.suppress(httpx.TransportError):
        while httpx.get(f"{url}/health").is_success:
            time.sleep(0.01)


def cut_off(first: signal.Signals, second: signal.Signals | None, *flags: str) -> Any:
    """End a server with a stream open by a signal or two; how it ended for the client, and for itself."""
    command = [sys.executable, "-m", "sim", "serve", "--listen", "127.0.0.1:0", *flags]
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[4]
        body = {"prompt": "x", "max_tokens": 10_000, "ignore_eos": True, "stream": True}
        outcome = None
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30.0) as response:
            events = response.iter_bytes()
            next(events)
            server.send_signal(first)
            if second is not None:
                wait_until_refused(url)  # equal signals that both wait to be handled are one
                server.send_signal(second)
            try:
                for _ in events:
                    pass
            except httpx.RemoteProtocolError as error:
                outcome = type(error)
        _, complaints = server.communicate(timeout=20)
        return outcome, server.returncode, complaints


@pytest.mark.parametrize(
    ("first", "second", "flags"),
    [
        (signal.SIGTERM, signal.SIGTERM, ("--drain", "60s")),
        (signal.SIGTERM, None, ("--drain", "0.2s")),
        (signal.SIGINT, None, ()),
    ],
    ids=["twice", "patience over", "ctrl-c"],
)
def test_an_answer_that_is_cut_is_seen_to_be(
    first: signal.Signals, second: signal.Signals | None, flags: tuple[str, ...]
) -> None:
    assert cut_off(first, second, *flags) == (httpx.RemoteProtocolError, 0, "")
