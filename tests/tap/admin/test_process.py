"""The admin process as a process: started, fed, hammered, told to leave; and a whole tap with one."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tap.admin.__main__ import MAX_CONNECTIONS, NICENESS
from tests.tap.admin.conftest import ROOT, AdminProcess
from tests.tap.admin.told import recorder_stats, service_stats, worker_stats
from tests.warmstart import WarmPopen, warm_children
from tracefile import load_trace


def test_what_is_pushed_is_served(admin: AdminProcess) -> None:
    assert admin.get("/healthz").json() == {"status": "ok"}
    admin.tell(service_stats())
    admin.push(worker_stats())
    admin.push(recorder_stats())
    live = admin.live_once("recorder.0.value", "800")
    assert live["engine"].startswith("vllm 0.32.0")
    assert b"kvtape_tap_recorded_total 800.0" in admin.get("/metrics").content


def test_it_goes_behind_all_others(admin: AdminProcess) -> None:
    assert os.getpriority(os.PRIO_PROCESS, admin.process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def test_signals_meant_for_the_terminal_do_not_end_it(admin: AdminProcess) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        admin.process.send_signal(number)
    assert admin.get("/healthz").status_code == 200


def test_connections_that_send_a_byte_now_and_then_keep_no_probe_from_its_answer(admin: AdminProcess) -> None:
    """A head each, never finished, on more connections than the port takes; and requests that are answered stay."""
    with contextlib.ExitStack() as stack:
        address = urlsplit(admin.url)
        kept = stack.enter_context(httpx.Client(base_url=admin.url, timeout=30))
        dripping = []
        for number in range(MAX_CONNECTIONS + 44):
            dripping.append(stack.enter_context(socket.create_connection((address.hostname, address.port))))
            dripping[-1].sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: 1")
            if not number % 30:
                assert kept.get("/healthz").json() == {"status": "ok"}
                assert admin.get("/metrics").status_code == 200
        for sock in dripping[-50:]:
            sock.sendall(b"1")
        assert admin.get("/healthz").json() == {"status": "ok"}


def test_a_sender_that_breaks_off_does_not_harm_it(admin: AdminProcess) -> None:
    admin.sender.offer(b"\xff\xff\x00\x00half a frame")
    admin.sender.close()
    assert admin.get("/healthz").status_code == 200


def test_it_leaves_quietly_in_the_middle_of_a_feed(admin: AdminProcess) -> None:
    for number in range(64):
        admin.push(worker_stats(number))  # the fixture says what it is to say at its end: nothing


def test_hammered_it_still_takes_what_it_is_told(admin: AdminProcess) -> None:
    """Eight clients asking as fast as they can: every answer is whole, and the feed is looked at in between."""
    stop = threading.Event()
    answers: list[int] = []

    def hammer() -> None:
        with httpx.Client(base_url=admin.url, timeout=30) as client:
            while not stop.is_set():
                answers.append(client.get("/live.json").status_code)

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        admin.tell(service_stats())
        admin.push(recorder_stats())
        admin.live_once("recorder.0.value", "800")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(answers) == {200}


class Tap:
    """``tap`` as a user starts it, with an admin port."""

    def __init__(self, folder: Path, upstream: str) -> None:
        self.trace = folder / "captured.jsonl"
        flags = ["--upstream", upstream, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--workers", "2"]
        flags += ["-o", str(self.trace), "--tokenizer", "ids", "--key-file", str(folder / "key")]
        self.process = WarmPopen(
            [sys.executable, "-m", "tap", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"listening on (http://\S+?),.* admin pages on (http://\S+)", line)
        assert found, line
        self.url, self.admin_url = found.groups()

    def end(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        output: str
        output, complaints = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, complaints
        return output


@pytest.fixture
def tap(tmp_path: Path, sim_server: str) -> Iterator[Tap]:
    tap = Tap(tmp_path, sim_server)
    yield tap
    if tap.process.poll() is None:
        tap.end()


def ask(tap: Tap, prompt: list[int], *, stream: bool = True) -> None:
    body = {"model": "kvtape-sim", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    assert httpx.post(tap.url + "/v1/completions", json=body, timeout=60).status_code == 200


def live_once(tap: Tap, wanted: Any) -> Any:
    deadline = time.monotonic() + 30
    while True:
        live = httpx.get(tap.admin_url + "/live.json", timeout=30).json()
        if wanted(live):
            return live
        assert time.monotonic() < deadline, live
        time.sleep(0.1)


def test_a_tap_with_an_admin_port(tap: Tap) -> None:
    """Forty requests on one prefix of 640 tokens; what the page says of them is what the trace says at the end."""
    live_once(tap, lambda live: live["recorder"])  # once it has reported, it is connected
    prefix = list(range(1_000, 1_640))
    for number in range(40):
        ask(tap, [*prefix, *range(5_000 + 100 * number, 5_040 + 100 * number)])
    ask(tap, [7] * 20, stream=False)
    live = live_once(tap, lambda live: ["Recorded", "41"] in [[one["name"], one["value"]] for one in live["recorder"]])
    # Each of 39 hits the prefix's 40 blocks, as the embedded engine reports.
    assert live["ready"]
    assert f"kvtape_tap_cached_tokens_total {39.0 * 640}" in httpx.get(tap.admin_url + "/metrics").text
    assert httpx.get(tap.admin_url + "/readyz").status_code == 200
    metrics = httpx.get(tap.admin_url + "/metrics").text
    assert "kvtape_tap_workers_up 2.0" in metrics
    tap.end()
    assert len(load_trace(tap.trace)[1]) == 41


def test_an_admin_process_that_dies_costs_no_request_and_comes_back(tmp_path: Path, sim_server: str) -> None:
    tap = Tap(tmp_path, sim_server)
    [admin] = warm_children(tap.process.pid, "tap.admin")
    os.kill(admin, signal.SIGKILL)
    for number in range(5):
        ask(tap, list(range(100 * number, 100 * number + 40)))
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(tap.admin_url + "/readyz", timeout=30).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ask(tap, [9] * 40)
    # Its counters are the recorder's own, so they tell of the requests that it did not see.
    live_once(tap, lambda live: ["Recorded", "6"] in [[fact["name"], fact["value"]] for fact in live["recorder"]])
    tap.end()
    assert len(load_trace(tap.trace)[1]) == 6
