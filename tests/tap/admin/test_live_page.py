"""The live page in a real browser: it shows what /live.json says, follows it, and asks nobody else for anything."""

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tap.admin.browser import CHROMIUM, Browser
from tests.tap.admin.conftest import PROGRESS, AdminProcess, record_numbers, tap_stats

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
    status: text(document.getElementById("status")),
    reasons: all("#reasons li").filter(shown).map(text),
    tiles: all(".tile").map((tile) => all("h2, .value, .detail", tile).map(text)),
    lines: all(".tile").filter((tile) => tile.querySelector("path")).map((tile) => text(tile.querySelector("h2"))),
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


def told(live: Any) -> dict[str, Any]:
    """What the page has to show of a snapshot."""
    return {
        "status": live["status"],
        "reasons": live["reasons"],
        "tiles": [[tile["title"], tile["value"], tile["detail"]] for tile in live["tiles"]],
        **{name: [[fact["name"], fact["value"]] for fact in live[name]] for name in ("recorder", "processes", "drops")},
    }


def assert_quiet(browser: Browser, admin: AdminProcess) -> None:
    assert browser.console == []
    assert browser.requested
    assert all(url.startswith((admin.url, "data:,", "about:")) for url in browser.requested), browser.requested


def test_it_shows_what_live_json_says_and_follows_it(admin: AdminProcess, browser: Browser, upstream: str) -> None:
    admin.tell(tap_stats(upstreams=[upstream]))
    admin.live_once("status", "ready")
    browser.open(admin.url + "/")
    browser.wait_for("document.querySelectorAll('.tile').length === 6")
    shown = browser.evaluate(SHOWN)
    steady = {name: value for name, value in told(admin.live()).items() if name != "tiles"}
    assert {name: shown[name] for name in steady} == steady
    assert shown["empty"] == []
    numbers = record_numbers((0.09, 0.09), prompt_tokens=2_004_000, cached_tokens=1_503_000)
    progress = msgspec.structs.replace(PROGRESS, numbers=numbers)
    for _ in range(2):
        admin.tell(tap_stats(upstreams=[upstream], progress=progress, dropped={"queue_full": 1_234}))
        time.sleep(0.05)
    tile = "[...document.querySelectorAll('.tile .value')].map((one) => one.textContent)"
    browser.wait_for(f"{tile}[4] === '75.0 %' && {tile}[3] === '≤ 100 ms' && {tile}[5] === '1,234'")
    shown = browser.evaluate(SHOWN)
    assert shown["drops"] == [["queue_full", "1,234"]]
    assert shown["lines"] == ["Requests a second", "In flight", "Output tokens a second", "Records dropped"]
    assert_quiet(browser, admin)


def test_an_idle_tap_explains_what_is_not_there_yet(admin: AdminProcess, browser: Browser) -> None:
    browser.open(admin.url + "/")
    browser.wait_for("document.getElementById('status').textContent === 'not ready'")
    shown = browser.evaluate(SHOWN)
    assert "the tap has not reported yet" in shown["reasons"]
    assert shown["empty"] == ["No request was dropped."]
    assert_quiet(browser, admin)


def test_a_hostile_trace_name_and_reason_stay_text(admin: AdminProcess, browser: Browser) -> None:
    admin.tell(tap_stats(dropped={"<img src=x onerror=alert(1)>": 1}))
    browser.open(admin.url + "/")
    browser.wait_for("document.querySelectorAll('.tile').length === 6")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate(SHOWN)["drops"] == [["<img src=x onerror=alert(1)>", "1"]]


def test_it_can_be_read_on_a_phone_and_in_the_dark(admin: AdminProcess, browser: Browser, upstream: str) -> None:
    admin.tell(tap_stats(upstreams=[upstream]))
    admin.live_once("recorder.0.value", "800")
    browser.open(admin.url + "/")
    browser.wait_for("document.querySelectorAll('.tile').length === 6")
    background = "getComputedStyle(document.body).backgroundColor"
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
