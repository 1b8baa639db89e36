"""The live page in a real browser: it shows what /live.json says, follows it, and asks nobody else for anything."""

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.histogram import WAIT_S, add_value, empty_counts
from tests.tap.admin.browser import CHROMIUM, Browser
from tests.tap.admin.conftest import AdminProcess
from tests.tap.admin.told import recorder_stats, service_stats, worker_stats

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
    lines: all(".tile").filter((tile) => tile.querySelector("path")).map((tile) => tile.dataset.tile),
    recorder: facts("recorder"), processes: facts("processes"), drops: facts("drops"),
    empty: all(".empty").filter(shown).map(text),
    wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    stale: document.body.classList.contains("stale"),
  };
})()"""


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


def told(live: Any) -> dict[str, Any]:
    """What the page has to show of a snapshot."""
    return {
        "status": live["status"],
        "reasons": live["reasons"],
        "tiles": [[tile["id"], tile["value"], tile["detail"]] for tile in live["tiles"]],
        **{name: [[fact["name"], fact["value"]] for fact in live[name]] for name in ("recorder", "processes", "drops")},
    }


def assert_quiet(browser: Browser, admin: AdminProcess) -> None:
    assert browser.console == []
    assert browser.requested
    assert all(url.startswith((admin.url, "data:,", "about:")) for url in browser.requested), browser.requested


def test_it_shows_what_live_json_says_and_follows_it(admin: AdminProcess, browser: Browser, upstream: str) -> None:
    feed(admin, upstream)
    admin.live_once("status", "ready")
    admin.live_once("recorder.0.value", "800")
    browser.open(admin.url + "/")
    shown = browser.evaluate(SHOWN)
    live = admin.live()
    steady = {name: value for name, value in told(live).items() if name != "tiles"}
    assert {name: shown[name] for name in steady} == steady
    assert [tile[0] for tile in shown["tiles"]] == [tile["id"] for tile in live["tiles"]]
    assert shown["empty"] == []
    while len(admin.live()["tiles"][0]["line"]) <= len(live["tiles"][0]["line"]):
        time.sleep(0.05)  # what comes before the first sample of the recorder's counts is no growth of them
    ttft = empty_counts(WAIT_S)
    for value_s in (0.03, 0.07, 0.4, 0.09, 0.09):  # the last two are new
        add_value(ttft, WAIT_S, value_s)
    admin.push(recorder_stats(prompt_tokens=2_004_000, cached_tokens=1_503_000, ttft=ttft))
    browser.wait_for("document.querySelector('[data-tile=cached] .value').textContent === '75.0 %'")
    browser.wait_for("document.querySelector('[data-tile=ttft] .value').textContent === '≤ 100 ms'")
    admin.tell(service_stats(upstream, dropped={"queue_full": 1_234}))
    browser.wait_for("document.querySelector('[data-tile=dropped] .value').textContent === '1,234'")
    shown = browser.evaluate(SHOWN)
    assert shown["drops"] == [["queue_full", "1,234"]]
    assert shown["lines"] == ["requests", "in-flight", "output", "dropped"]
    assert_quiet(browser, admin)


def test_an_idle_tap_explains_what_is_not_there_yet(admin: AdminProcess, browser: Browser) -> None:
    browser.open(admin.url + "/")
    shown = browser.evaluate(SHOWN)
    assert shown["status"] == "not ready"
    assert "the tap has not reported yet" in shown["reasons"]
    assert len(shown["empty"]) == 3  # records, drops and processes
    assert_quiet(browser, admin)


def test_it_can_be_read_on_a_phone_and_in_the_dark(admin: AdminProcess, browser: Browser, upstream: str) -> None:
    feed(admin, upstream)
    admin.live_once("recorder.0.value", "800")
    browser.open(admin.url + "/")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    browser.use_colours("light")
    light = browser.evaluate(background)
    browser.use_colours("dark")
    assert browser.evaluate(background) != light
    browser.resize(360, 800)
    browser.wait_for("innerWidth === 360")  # with a scroll bar, or without
    assert not browser.evaluate(SHOWN)["wide"]
    assert_quiet(browser, admin)


def test_a_tap_that_does_not_answer_any_more_is_said_to(admin: AdminProcess, browser: Browser) -> None:
    browser.open(admin.url + "/")
    admin.control.close()
    admin.process.wait(timeout=30)
    browser.wait_for("document.body.classList.contains('stale')")
    assert browser.evaluate(SHOWN)["status"] == "not answering"
