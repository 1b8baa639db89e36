"""A page: what it holds, and in headless Chromium what it drew and asked for."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
OFFLINE = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
MOST_BYTES = 1_600_000
BUNDLED = {"bar", "pie", "scatter"}
"""Types of traces that plotly's basic bundle draws; it throws no error for any other."""


def page_figures(page: str) -> dict[str, Any]:
    """The figures of a page, each drawn by what its bundle has; the page is small enough to be sent around."""
    assert len(page.encode()) < MOST_BYTES
    figures: dict[str, Any] = json.loads(page.split('id="figures">')[1].split("</script>", maxsplit=1)[0])
    assert {trace["type"] for figure in figures.values() for trace in figure["data"]} <= BUNDLED
    return figures


def figures_drawn(page: Path) -> set[str]:
    """Opens a page, checks that every place for a figure was drawn in and nothing fetched; returns the places' ids."""
    # The page's own browser tells what it fetched: every resource that was asked for, answered or not.
    fetched = '`fetched:${performance.getEntriesByType("resource").map(one => one.name)}`'
    report = f'addEventListener("load", () => {{ document.title = {fetched} }})'
    page_figures(page.read_text())
    page.write_text(page.read_text().replace("</body>", f"<script>{report}</script></body>"))
    flags = [*QUIET, *OFFLINE, "--dump-dom", "--virtual-time-budget=5000", f"--user-data-dir={page.parent / 'profile'}"]
    command = [str(CHROMIUM), *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    positions = re.findall(r'class="plot[^"]*" id="([^"]+)"', done.stdout)
    assert done.stdout.count('class="main-svg"') >= len(positions)
    assert "<title>fetched:</title>" in done.stdout
    assert "Content Security Policy" not in done.stderr
    return set(positions)
