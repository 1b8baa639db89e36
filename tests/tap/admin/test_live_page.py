"""The live page in a real browser: it shows what /live.json says, follows it, and asks nobody else for anything."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tap.admin.browser import CHROMIUM, Browser
from tests.tap.admin.conftest import AdminProcess
from tests.tap.admin.told import conversation_feed, recorder_stats, service_stats, worker_stats

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")]

SHOWN = """(() => {
  const text = (place) => place.textContent;
  const all = (wanted, within = document) => [...within.querySelectorAll(wanted)];
  const shown = (place) => place.checkVisibility();
  const facts = (name) => {
    const list = document.querySelector(`[data-facts=${name}]`);
    return all("dt", list).map((dt, i) => [text(dt), text(all("dd", list)[i])]);
  };
  return {
    status: text(document.getElementById("status")), at: text(document.getElementById("at")),
    reasons: all("#reasons li").filter(shown).map(text),
    tiles: all(".tile").map((tile) => [tile.dataset.tile, ...all(".value, .detail", tile).map(text)]),
    cohorts: all("tr[data-cohort]").map((row) => [row.dataset.cohort, ...all("td", row).map(text)]),
    curves: all("path[data-cohort]").map((path) => path.dataset.cohort),
    sentence: text(document.querySelector("#hit-curve .sentence")),
    hits: all("path[data-curve]").length,
    prefixes: all("#prefixes tbody tr").map((row) => [text(row.querySelector("th")), ...all("td", row).map(text)]),
    recorder: facts("recorder"), processes: facts("processes"), drops: facts("drops"),
    empty: all(".empty").filter(shown).map(text),
    plots: all(".plot").filter(shown).map((plot) => plot.getAttribute("aria-label")),
    wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    stale: document.body.classList.contains("stale"),
  };
})()"""

POINT = """(() => {
  const plot = document.querySelector("#hit-curve .plot");
  const mark = plot.querySelector("line.mark").getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", { clientX: mark.left + mark.width / 2, clientY: mark.top + 9 }));
  return document.querySelector("#hit-curve h3 .at").textContent;
})()"""
"""Puts the pointer on the real cache's size; what the readout says there."""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture
def upstream() -> Iterator[str]:
    """Something that takes connections."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def feed(admin: AdminProcess, upstream: str) -> None:
    admin.tell(service_stats(upstream))
    admin.push(worker_stats())
    admin.push(recorder_stats())
    admin.push(conversation_feed())


def told(live: Any) -> dict[str, Any]:
    """What the page has to show of a snapshot."""
    cohorts = live["by_turn"] + live["by_uncached"]
    return {
        "status": live["status"],
        "reasons": live["reasons"],
        "tiles": [[tile["id"], tile["value"], tile["detail"]] for tile in live["tiles"]],
        "cohorts": [[one["cohort"], *(level["text"] for level in one["quantiles"])] for one in cohorts],
        "curves": [one["cohort"] for one in cohorts if one["judged"]],
        "sentence": live["hit_curve"]["sentence"],
        "prefixes": [[row["hash"], row["depth"], row["requests"], row["share"]] for row in live["prefixes"]],
        **{name: [[fact["name"], fact["value"]] for fact in live[name]] for name in ("recorder", "processes", "drops")},
    }


def assert_quiet(browser: Browser, admin: AdminProcess) -> None:
    assert browser.console == []
    assert browser.requested
    assert all(url.startswith((admin.url, "data:,", "about:")) for url in browser.requested), browser.requested


def test_it_shows_what_live_json_says_and_follows_it(admin: AdminProcess, browser: Browser, upstream: str) -> None:
    feed(admin, upstream)
    admin.live_once("status", "ready")
    admin.live_once("hit_curve.requests", 300)
    browser.open(admin.url + "/")
    shown = browser.evaluate(SHOWN)
    live = admin.live()
    steady = {name: value for name, value in told(live).items() if name != "tiles"}
    assert {name: shown[name] for name in steady} == steady
    assert [tile[0] for tile in shown["tiles"]] == [tile["id"] for tile in live["tiles"]]
    assert shown["hits"] == 1
    assert shown["empty"] == []
    assert len([plot for plot in shown["plots"] if plot]) == 3
    assert browser.evaluate(POINT).startswith("64")  # the engine's cache is marked at 64,000 tokens
    admin.push(recorder_stats(prompt_tokens=9_000_000, feed_skipped=77))
    admin.tell(service_stats(upstream, dropped={"queue_full": 1_234}))
    browser.wait_for("document.querySelector('[data-tile=dropped] .value').textContent === '1,234'")
    browser.wait_for("document.querySelector('[data-facts=recorder]').textContent.includes('77 records')")
    assert browser.evaluate(SHOWN)["drops"] == [["queue_full", "1,234"]]
    assert_quiet(browser, admin)


def test_an_idle_tap_explains_what_is_not_there_yet(admin: AdminProcess, browser: Browser) -> None:
    browser.open(admin.url + "/")
    shown = browser.evaluate(SHOWN)
    assert shown["status"] == "not ready"
    assert "the tap has not reported yet" in shown["reasons"]
    assert len(shown["empty"]) == 7  # two survivals, the curve, the prefixes, records, drops and processes
    assert (shown["plots"], shown["curves"], shown["prefixes"]) == ([], [], [])
    assert_quiet(browser, admin)


def test_it_can_be_read_on_a_phone_and_in_the_dark(admin: AdminProcess, browser: Browser, upstream: str) -> None:
    feed(admin, upstream)
    admin.live_once("hit_curve.requests", 300)
    browser.open(admin.url + "/")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    browser.use_colours("light")
    light = browser.evaluate(background)
    browser.use_colours("dark")
    assert browser.evaluate(background) != light
    browser.resize(360, 800)
    browser.wait_for("document.querySelector('.plot svg').viewBox.baseVal.width < 360")
    assert not browser.evaluate(SHOWN)["wide"]
    assert_quiet(browser, admin)


def test_a_tap_that_does_not_answer_any_more_is_said_to(admin: AdminProcess, browser: Browser) -> None:
    browser.open(admin.url + "/")
    admin.control.close()
    admin.process.wait(timeout=30)
    browser.wait_for("document.body.classList.contains('stale')")
    assert browser.evaluate(SHOWN)["status"] == "not answering"
