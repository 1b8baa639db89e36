"""The admin port's pages, in this process: what they say, what they never hold, who may read them."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tap.admin.__main__ import SHARED_S, Page, Pages
from tap.admin.state import LiveState, probe_once, takes_connections
from tap.admin.view import Fact, upstream_facts
from tap.ipc.messages import AdminSetup, TapStats, UpstreamStats
from tests.tap.admin.conftest import PROGRESS, UPSTREAM, tap_stats, worker_stats
from wire.head import parse_request_head

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvtape-tap.json").read_text())


class Rig:
    """Pages of a state, and the clock of both."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.state = LiveState(AdminSetup(listen_fd=0, trace="/data/captured.jsonl"))
        self.pages = Pages(self.state, lambda: self.now_s)

    def tell(self, **changes: Any) -> None:
        """Tell of a tap that is well but for these changes."""
        self.state.take(tap_stats(**changes), self.now_s)
        self.state.reachable = self.state.reachable or {UPSTREAM: True}

    def get(self, path: str, method: str = "GET", **headers: str) -> Page:
        lines = "".join(f"{name}: {value}\r\n" for name, value in ({"Host": "127.0.0.1:9001"} | headers).items())
        return self.pages.page(parse_request_head(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()))

    def json(self, path: str) -> Any:
        return json.loads(self.get(path).body)

    def scrape(self) -> dict[str, Metric]:
        self.now_s += SHARED_S
        text = self.get("/metrics").body.decode()
        return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def values(family: Metric) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}


def test_alive_is_not_ready(rig: Rig) -> None:
    assert rig.json("/healthz") == {"status": "ok"}
    answer = rig.get("/readyz")
    assert answer.status.startswith(b"503")
    assert json.loads(answer.body) == {
        "ready": False,
        "reasons": ["the tap has not reported yet", "no upstream has been tried yet"],
        "not_recording": ["the recorder is down"],
    }


@pytest.mark.parametrize(
    ("changes", "reachable", "reasons"),
    [
        ({}, {UPSTREAM: True}, []),
        ({}, {UPSTREAM: False, "http://other": True}, []),  # one of them is enough
        ({}, {UPSTREAM: False}, ["no upstream takes connections"]),
        ({"workers_up": 0, "draining": True}, {UPSTREAM: True}, ["the tap is draining", "no worker is up"]),
        ({"recorder_up": False}, {UPSTREAM: True}, []),  # a tap that serves stays in service
    ],
)
def test_ready_when_it_can_serve_and_what_speaks_against_it(
    rig: Rig, changes: dict[str, Any], reachable: dict[str, bool], reasons: list[str]
) -> None:
    rig.tell(**changes)
    rig.state.reachable = reachable
    assert rig.get("/readyz").status.startswith(b"503" if reasons else b"200")
    assert rig.json("/readyz")["reasons"] == reasons


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"recorder_silent_s": 14.0}, []),
        ({"recorder_silent_s": 60.0}, ["the recorder has been silent for 60 s"]),
        ({"recorder_up": False}, ["the recorder is down"]),
        (
            {"progress": msgspec.structs.replace(PROGRESS, writing=False)},
            ["the recorder cannot write the trace"],
        ),
    ],
)
def test_a_tap_that_cannot_record_serves_and_says_so(rig: Rig, changes: dict[str, Any], reasons: list[str]) -> None:
    rig.tell(**changes)
    assert rig.json("/readyz") == {"ready": True, "reasons": [], "not_recording": reasons}
    status = "not recording" if reasons else "ready"
    assert f">{status}</span>" in rig.get("/").body.decode()


def test_what_the_page_shows_is_text(rig: Rig) -> None:
    rig.state.setup = AdminSetup(listen_fd=0, trace="<script>alert(1)</script>")
    rig.tell(dropped={"<b>": 1})
    page = rig.get("/").body
    assert b"<script" not in page
    assert b"<b>" not in page


def test_another_sites_page_reads_nothing(rig: Rig) -> None:
    assert rig.get("/metrics", Origin="http://evil.example.com").status.startswith(b"403")
    assert rig.get("/metrics").status.startswith(b"200")


def test_an_upstream_is_probed_by_connecting_only(free_port: int) -> None:
    async def scenario() -> None:
        heard: list[bytes] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read())
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base"
        assert await takes_connections(url)
        assert not await takes_connections("nonsense")
        state = Rig().state
        await probe_once(state, [url, f"http://127.0.0.1:{free_port}"])
        assert list(state.reachable.values()) == [True, False]
        server.close()
        assert set(heard) <= {b""}

    asyncio.run(scenario())


@pytest.fixture
def families(rig: Rig) -> dict[str, Metric]:
    rig.tell(worker_restarts=1, worker_stats=[worker_stats(0), worker_stats(1, relayed=500)])
    return rig.scrape()


def test_every_number_is_where_its_name_says(families: dict[str, Metric]) -> None:
    assert values(families["kvtape_tap_relayed"]) == {
        ("kvtape_tap_relayed_total", "0"): 1_000,
        ("kvtape_tap_relayed_total", "1"): 500,
    }
    assert values(families["kvtape_tap_dropped"]) == {
        ("kvtape_tap_dropped_total", "queue_full"): 6,
        ("kvtape_tap_dropped_total", "trace_unwritable"): 2,
    }
    requests = families["kvtape_tap_requests"].samples
    assert [(one.labels["status"], one.labels["http_status"], one.value) for one in requests] == [
        ("ok", "200", 780),
        ("client_abort", "200", 15),
        ("error", "429", 5),
    ]
    singles = {"recorded": 800, "hashed": 790, "offered": 900, "upload_failures": 1, "worker_restarts": 1, "ready": 1}
    for name, value in singles.items():
        assert list(values(families[f"kvtape_tap_{name}"]).values()) == [value], name


def test_upstreams_are_counted_by_worker_and_said_to_serve_or_not(rig: Rig, families: dict[str, Metric]) -> None:
    assert values(families["kvtape_tap_upstream_requests"]) == {
        ("kvtape_tap_upstream_requests_total", UPSTREAM, "0"): 400,
        ("kvtape_tap_upstream_requests_total", UPSTREAM, "1"): 401,
    }
    assert values(families["kvtape_tap_misrouted"])["kvtape_tap_misrouted_total", "raises", "1"] == 2
    assert values(families["kvtape_tap_upstream_serving"]) == {("kvtape_tap_upstream_serving", UPSTREAM): 1.0}
    rig.tell(worker_stats=[worker_stats(upstreams=[UpstreamStats(UPSTREAM, ejected=True)])])
    assert rig.state.reasons_against_upstreams() == {UPSTREAM: "left out after failures"}
    serving = values(rig.scrape()["kvtape_tap_upstream_serving"])
    assert serving == {("kvtape_tap_upstream_serving", UPSTREAM): 0.0}
    words = "takes connections, 3 in flight, 400 requests, 75.0 % of prompts' starts known, left out after failures"
    assert upstream_facts(rig.state, tap_stats()) == [Fact(UPSTREAM, words, True)]


def test_a_tap_that_has_just_started_can_be_scraped(rig: Rig) -> None:
    assert values(rig.scrape()["kvtape_tap_ready"]) == {("kvtape_tap_ready",): 0}
    rig.state.take(TapStats(upstreams=[UPSTREAM], workers=2), 0.0)
    assert values(rig.scrape()["kvtape_tap_workers_up"]) == {("kvtape_tap_workers_up",): 0}


def test_the_dashboard_draws_every_metric_by_labels_that_are_there(families: dict[str, Metric]) -> None:
    labels = {
        sample.name: set(sample.labels) | {"instance", "le"}
        for family in families.values()
        for sample in family.samples
    }
    drawn: set[str] = set()
    for text in [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]:
        names = re.findall(r"kvtape_tap_\w+", text)
        drawn.update(names)
        grouped = {label.strip() for found in re.findall(r" by \(([^)]*)\)", text) for label in found.split(",")}
        assert all(grouped <= labels[name] for name in names), text
    undrawn = {family.name for family in families.values() if not any(name.startswith(family.name) for name in drawn)}
    assert undrawn == set()


def test_every_metric_is_defined_in_the_documentation(families: dict[str, Metric]) -> None:
    section = (ROOT / "docs" / "metrics.md").read_text().split("## A tap's own metrics")[1]
    defined = set(re.findall(r"`([a-z_]+)`", "\n".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))))
    names = {
        name.removeprefix("kvtape_tap_") + ("_total" if family.type == "counter" else "")
        for name, family in families.items()
    }
    assert defined == names
