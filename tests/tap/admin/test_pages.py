"""Admin pages, in this process: health, readiness, metrics, access."""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tap.admin.pages import Page, page_of
from tap.admin.state import TapStats
from tap.ipc.messages import UpstreamStats
from tap.supervisor.service import Service
from tests.tap.admin.conftest import PROGRESS, UPSTREAM, tap_stats, worker_stats
from tests.tap.conftest import COMPLETION, settings_of, upstream_of
from tests.waiting import until
from wire.head import parse_request_head
from wire.url import parse_url

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvtape-tap.json").read_text())


def get(path: str, stats: TapStats, method: str = "GET", **headers: str) -> Page:
    lines = "".join(f"{name}: {value}\r\n" for name, value in ({"Host": "127.0.0.1:9001"} | headers).items())
    return page_of(parse_request_head(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()), lambda: stats)


def readiness(stats: TapStats) -> Any:
    return json.loads(get("/readyz", stats).body)


def scrape(stats: TapStats) -> dict[str, Metric]:
    text = get("/metrics", stats).body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}


JUST_STARTED = TapStats(upstreams=[UPSTREAM], workers=2)


def test_healthz_and_readyz_differ() -> None:
    assert json.loads(get("/healthz", JUST_STARTED).body) == {"status": "ok"}
    answer = get("/readyz", JUST_STARTED)
    assert answer.status.startswith(b"503")
    assert json.loads(answer.body) == {
        "ready": False,
        "reasons": ["no worker is up", "no upstream was probed yet"],
        "not_recording": ["the recorder is down"],
    }


@pytest.mark.parametrize(
    ("changes", "reachable", "reasons"),
    [
        ({}, {UPSTREAM: True}, []),
        ({}, {UPSTREAM: False, "http://other": True}, []),  # one reachable upstream is enough
        ({}, {UPSTREAM: False}, ["no upstream accepts connections"]),
        ({"workers_up": 0, "draining": True}, {UPSTREAM: True}, ["the tap is draining", "no worker is up"]),
        ({"recorder_up": False}, {UPSTREAM: True}, []),  # a tap that serves stays in service
    ],
)
def test_readiness_reasons(changes: dict[str, Any], reachable: dict[str, bool], reasons: list[str]) -> None:
    stats = tap_stats(**changes, reachable=reachable)
    assert get("/readyz", stats).status.startswith(b"503" if reasons else b"200")
    assert readiness(stats)["reasons"] == reasons


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"recorder_silent_s": 14.0}, []),
        ({"recorder_silent_s": 60.0}, ["no report of the recorder for 60 s"]),
        ({"recorder_up": False}, ["the recorder is down"]),
        (
            {"progress": msgspec.structs.replace(PROGRESS, writing=False)},
            ["the recorder cannot write the trace"],
        ),
    ],
)
def test_a_tap_that_cannot_record_is_ready_and_reports_it(changes: dict[str, Any], reasons: list[str]) -> None:
    assert readiness(tap_stats(**changes)) == {"ready": True, "reasons": [], "not_recording": reasons}


def test_cross_origin_requests_are_refused() -> None:
    assert get("/metrics", tap_stats(), Origin="http://evil.example.com").status.startswith(b"403")
    assert get("/metrics", tap_stats()).status.startswith(b"200")
    assert get("/metrics", tap_stats(), "POST").status.startswith(b"405")


def test_an_upstream_is_probed_by_connecting_only(free_port: int) -> None:
    async def scenario() -> None:
        heard: list[bytes] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read())
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        there = parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base")
        away = parse_url(f"http://127.0.0.1:{free_port}")
        service = Service(settings_of(upstreams=(there, away), trace="-"))
        probing = asyncio.create_task(service.probe_upstreams())
        await until(lambda: service.stats().reachable == {str(there): True, str(away): False})
        probing.cancel()
        server.close()
        assert set(heard) <= {b""}

    asyncio.run(scenario())


@pytest.fixture
def families() -> dict[str, Metric]:
    return scrape(tap_stats(worker_restarts=1, worker_stats=[worker_stats(0), worker_stats(1, relayed=500)]))


def test_metric_values(families: dict[str, Metric]) -> None:
    assert values(families["kvtape_tap_relayed"]) == {
        ("kvtape_tap_relayed_total", "0"): 1_000,
        ("kvtape_tap_relayed_total", "1"): 500,
    }
    assert values(families["kvtape_tap_dropped"]) == {
        ("kvtape_tap_dropped_total", "queue_full"): 6,
        ("kvtape_tap_dropped_total", "trace_unwritable"): 2,
    }
    requests = families["kvtape_tap_requests"].samples
    assert [(item.labels["status"], item.labels["http_status"], item.value) for item in requests] == [
        ("ok", "200", 780),
        ("client_abort", "200", 15),
        ("error", "429", 5),
    ]
    singles = {"recorded": 800, "hashed": 790, "offered": 900, "upload_failures": 1, "worker_restarts": 1, "ready": 1}
    for name, value in singles.items():
        assert list(values(families[f"kvtape_tap_{name}"]).values()) == [value], name


def test_upstream_metrics_by_worker(families: dict[str, Metric]) -> None:
    assert values(families["kvtape_tap_upstream_requests"]) == {
        ("kvtape_tap_upstream_requests_total", UPSTREAM, "0"): 400,
        ("kvtape_tap_upstream_requests_total", UPSTREAM, "1"): 401,
    }
    assert values(families["kvtape_tap_misrouted"])["kvtape_tap_misrouted_total", "raises", "1"] == 2
    assert values(families["kvtape_tap_upstream_serving"]) == {("kvtape_tap_upstream_serving", UPSTREAM): 1.0}
    stats = tap_stats(worker_stats=[worker_stats(upstreams=[UpstreamStats(UPSTREAM, ejected=True)])])
    serving = values(scrape(stats)["kvtape_tap_upstream_serving"])
    assert serving == {("kvtape_tap_upstream_serving", UPSTREAM): 0.0}


def test_metrics_right_after_the_start() -> None:
    families = scrape(JUST_STARTED)
    assert values(families["kvtape_tap_ready"]) == {("kvtape_tap_ready",): 0}
    assert values(families["kvtape_tap_workers_up"]) == {("kvtape_tap_workers_up",): 0}


def test_dashboard_uses_every_metric_with_existing_labels(families: dict[str, Metric]) -> None:
    labels = {
        sample.name: set(sample.labels) | {"instance", "le"}
        for family in families.values()
        for sample in family.samples
    }
    used: set[str] = set()
    for text in [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]:
        names = re.findall(r"kvtape_tap_\w+", text)
        used.update(names)
        grouped = {label.strip() for actual in re.findall(r" by \(([^)]*)\)", text) for label in actual.split(",")}
        assert all(grouped <= labels[name] for name in names), text
    undrawn = {family.name for family in families.values() if not any(name.startswith(family.name) for name in used)}
    assert undrawn == set()


def test_every_metric_is_documented(families: dict[str, Metric]) -> None:
    section = (ROOT / "docs" / "metrics.md").read_text().split("## A tap's own metrics")[1]
    defined = set(re.findall(r"`([a-z_]+)`", "\n".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))))
    names = {
        name.removeprefix("kvtape_tap_") + ("_total" if family.type == "counter" else "")
        for name, family in families.items()
    }
    assert defined == names


def test_admin_pages_respond_despite_incomplete_requests(lab: Any) -> None:
    async def scenario() -> None:
        async with upstream_of(lab) as port, lab.command(port, "--admin", "127.0.0.1:0", "--workers", "2") as tap:
            actual = re.search(r"admin pages on (http://\S+)", tap.output)
            assert actual is not None
            address = urlsplit(actual[1])
            dripping = [socket.create_connection((address.hostname, address.port)) for _ in range(300)]
            for sock in dripping:
                sock.sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: 1")

            def page(path: str, method: str = "GET") -> httpx.Response:
                return httpx.request(method, actual[1] + path, timeout=30)

            for _ in range(5):
                assert b"200 OK" in await tap.post("/v1/completions", COMPLETION)
            await until(lambda: "kvtape_tap_recorded_total 5.0" in page("/metrics").text)
            await until(lambda: page("/readyz").status_code == 200)
            await until(lambda: "kvtape_tap_upstream_requests_total{" in page("/metrics").text)
            assert "kvtape_tap_workers_up 2.0" in page("/metrics").text
            for path in ("/", "/metrics", "/readyz", "/healthz"):
                headers = page(path).headers
                assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
            assert page("/metrics", "HEAD").content == b""
            for sock in dripping:
                sock.close()
            await tap.end()
            assert tap.code == 0, tap.errors

    asyncio.run(scenario())
    assert lab.summary["recorded"] == 5
