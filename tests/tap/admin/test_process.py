"""The admin process: it follows what it is told, stays behind all others, and costs no request when it dies."""

import asyncio
import os
import re
import signal
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx

from tap.admin.__main__ import NICENESS
from tests.tap.admin.conftest import AdminProcess, tap_stats
from tests.tap.conftest import COMPLETION, upstream_of
from tests.waiting import until


def test_what_is_told_is_served_and_nothing_from_outside_is_allowed(admin: AdminProcess) -> None:
    assert admin.get("/healthz").json() == {"status": "ok"}
    admin.tell(tap_stats())
    assert "kvtape_tap_recorded_total 800.0" in admin.once("/metrics", "kvtape_tap_offered_total 900.0")
    assert "vllm 0.32.0" in admin.once("/", ">800</td>")
    for path in ("/", "/metrics", "/page.css", "/readyz", "/healthz"):
        headers = admin.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'self';")
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
    assert httpx.head(admin.url + "/metrics", timeout=30).content == b""


def test_it_goes_behind_all_others_and_no_signal_of_the_terminal_ends_it(admin: AdminProcess) -> None:
    assert os.getpriority(os.PRIO_PROCESS, admin.process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        admin.process.send_signal(number)
    assert admin.get("/healthz").status_code == 200


def test_connections_that_send_half_a_head_keep_no_probe_from_its_answer(admin: AdminProcess) -> None:
    address = urlsplit(admin.url)
    dripping = [socket.create_connection((address.hostname, address.port)) for _ in range(300)]
    for sock in dripping:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: 1")
    assert admin.get("/healthz").json() == {"status": "ok"}
    for sock in dripping:
        sock.close()


def test_a_tap_tells_its_numbers_and_its_admin_process_that_dies_costs_no_request(lab: Any) -> None:
    async def scenario() -> None:
        async with upstream_of(lab) as port, lab.command(port, "--admin", "127.0.0.1:0", "--workers", "2") as tap:
            found = re.search(r"admin pages on (http://\S+)", tap.output)
            assert found is not None

            def page(path: str) -> httpx.Response:
                try:
                    return httpx.get(found[1] + path, timeout=30)
                except httpx.HTTPError:
                    return httpx.Response(502)

            for _ in range(5):
                assert b"200 OK" in await tap.post("/v1/completions", COMPLETION)
            await until(lambda: "kvtape_tap_recorded_total 5.0" in page("/metrics").text)
            await until(lambda: page("/readyz").status_code == 200)
            await until(lambda: "kvtape_tap_upstream_requests_total{" in page("/metrics").text)
            assert "kvtape_tap_workers_up 2.0" in page("/metrics").text
            [first] = tap.pids("tap.admin")
            os.kill(first, signal.SIGKILL)
            assert b"200 OK" in await tap.post("/v1/completions", COMPLETION)
            await until(
                lambda: "kvtape_tap_recorded_total 6.0" in page("/metrics").text
            )  # its counters are the recorder's own
            assert tap.pids("tap.admin") not in ([], [first])
            await tap.end()
            assert tap.code == 0, tap.errors

    asyncio.run(scenario())
    assert lab.summary["recorded"] == 6
