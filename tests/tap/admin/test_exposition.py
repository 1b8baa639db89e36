"""/metrics as Prometheus reads it, and the dashboard that is drawn from it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from measure.exposition import exposition
from tap.admin.app import tap_metrics
from tap.admin.health import reasons_against
from tap.admin.state import LiveState
from tap.admin.view import Fact, upstream_facts
from tap.ipc.exchange import AdminSetup
from tap.ipc.feed import CacheFeedStats, UpstreamStats
from tests.tap.admin.told import recorder_stats, service_stats, worker_stats

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "kvtape-tap.json"

FEEDS = [
    CacheFeedStats("http://a:1", True, 5, 1, 0, 900, 2, 0.25),
    CacheFeedStats("http://b:1", False, 0, 0, 0, 0, 0, None),
]


@pytest.fixture
def state() -> LiveState:
    state = LiveState(AdminSetup(listen_fd=0, feed_socket="", trace="t.jsonl"))
    state.take(service_stats(worker_restarts=1), 10.0)
    state.take(worker_stats(0), 10.0)
    state.take(worker_stats(1, relayed=500), 10.0)
    state.take(recorder_stats(cache_feeds=FEEDS), 10.0)
    state.reachable = {"http://127.0.0.1:9": True}
    return state


def scrape(state: LiveState) -> dict[str, Metric]:
    text = exposition(tap_metrics(state, 10.0)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}


def test_every_number_is_where_its_name_says(state: LiveState) -> None:
    families = scrape(state)
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
    singles = {
        "recorded": 800,
        "sampled_out": 80,
        "hashed": 790,
        "offered": 900,
        "prompt_counts_matched": 699,
        "upload_failures": 1,
        "worker_restarts": 1,
    }
    for name, value in singles.items():
        assert list(values(families[f"kvtape_tap_{name}"]).values()) == [value], name
    assert values(families["kvtape_tap_ready"]) == {("kvtape_tap_ready",): 1}


def test_upstreams_are_counted_by_worker_and_said_to_serve_or_not(state: LiveState) -> None:
    here = "http://127.0.0.1:9"
    families = scrape(state)
    assert values(families["kvtape_tap_upstream_requests"]) == {
        ("kvtape_tap_upstream_requests_total", here, "0"): 400,
        ("kvtape_tap_upstream_requests_total", here, "1"): 401,
    }
    assert (
        values(families["kvtape_tap_upstream_known_bytes"])["kvtape_tap_upstream_known_bytes_total", here, "0"] == 6144
    )
    assert values(families["kvtape_tap_misrouted"])["kvtape_tap_misrouted_total", "raises", "1"] == 2
    assert values(families["kvtape_tap_upstream_serving"]) == {("kvtape_tap_upstream_serving", here): 1.0}
    state.take(worker_stats(1, upstreams=[UpstreamStats(here, ejected=True)]), 10.0)
    assert state.reasons_against_upstreams() == {here: "left out after failures"}
    state.take(service_stats(unhealthy_upstreams=[here]), 10.0)
    assert state.reasons_against_upstreams() == {here: "its checks fail"}
    assert reasons_against(state) == ["no upstream is healthy"]
    state.take(service_stats(draining_upstreams=[here]), 10.0)
    assert values(scrape(state)["kvtape_tap_upstream_serving"]) == {("kvtape_tap_upstream_serving", here): 0.0}
    [fact] = upstream_facts(state)
    assert fact == Fact(
        here, "takes connections, 3 in flight, 400 requests, 75.0 % of prompts' starts known, draining", True
    )


def test_histograms_are_cumulative_and_workers_are_added_up(state: LiveState) -> None:
    families = scrape(state)
    ttft = values(families["kvtape_tap_ttft_seconds"])
    assert ttft["kvtape_tap_ttft_seconds_bucket", "0.03"] == 1
    assert ttft["kvtape_tap_ttft_seconds_bucket", "0.4"] == 3
    assert ttft["kvtape_tap_ttft_seconds_count",] == 3
    assert ttft["kvtape_tap_ttft_seconds_sum",] == pytest.approx(0.5)
    chunks = {
        sample.labels.get("le"): sample.value
        for sample in families["kvtape_tap_overhead_seconds"].samples
        if sample.labels["part"] == "chunk" and sample.name.endswith("_bucket")
    }
    assert (chunks["1e-05"], chunks["1.5e-05"], chunks["+Inf"]) == (0, 4, 10)  # 12 and 14 µs of either worker


def test_a_tap_that_has_just_started_can_be_scraped() -> None:
    empty = LiveState(AdminSetup(listen_fd=0, feed_socket="", trace="t.jsonl"))
    families = scrape(empty)
    assert values(families["kvtape_tap_ready"]) == {("kvtape_tap_ready",): 0}
    empty.take(worker_stats(chunk=worker_stats().chunk.__class__([])), 1.0)  # one that has measured nothing yet
    assert values(scrape(empty)["kvtape_tap_in_flight"]) == {("kvtape_tap_in_flight", "0"): 7}


def test_every_name_and_help_is_good_prometheus(state: LiveState) -> None:
    for name, family in scrape(state).items():
        assert re.fullmatch(r"kvtape_tap_[a-z_]+", name)
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")


def expressions(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_draws_every_metric_and_none_that_is_not_there(state: LiveState) -> None:
    families = scrape(state)
    there = {sample.name for family in families.values() for sample in family.samples}
    drawn = {
        name for text in expressions(json.loads(DASHBOARD.read_text())) for name in re.findall(r"kvtape_tap_\w+", text)
    }
    assert drawn <= there
    undrawn = {family.name for family in families.values() if not any(name.startswith(family.name) for name in drawn)}
    assert undrawn == set()


def test_the_dashboards_labels_are_there(state: LiveState) -> None:
    labels = {
        sample.name: set(sample.labels) | {"instance"} for family in scrape(state).values() for sample in family.samples
    }
    for text in expressions(json.loads(DASHBOARD.read_text())):
        grouped = {label.strip() for found in re.findall(r" by \(([^)]*)\)", text) for label in found.split(",")}
        for name in re.findall(r"kvtape_tap_\w+", text):
            if grouped:
                assert grouped <= labels[name] | {"le"}, text


def test_the_dashboards_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_every_metric_is_defined_in_the_documentation(state: LiveState) -> None:
    section = (ROOT / "docs" / "metrics.md").read_text().split("## A tap's own metrics")[1]
    defined = set(re.findall(r"`([a-z_]+)`", "\n".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))))
    names = {
        name.removeprefix("kvtape_tap_") + ("_total" if family.type == "counter" else "")
        for name, family in scrape(state).items()
    }
    assert defined == names


def test_kv_events_are_told_by_upstream(state: LiveState) -> None:
    families = scrape(state)
    found = {name: list(values(families[f"kvtape_tap_kv_{name}"]).values()) for name in ("events_up", "blocks", "gaps")}
    assert found == {"events_up": [1, 0], "blocks": [900, 0], "gaps": [1, 0]}
    assert values(families["kvtape_tap_kv_lag_seconds"]) == {("kvtape_tap_kv_lag_seconds", "http://a:1"): 0.25}
