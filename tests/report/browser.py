"""A page in headless Chromium: what it drew, and what it asked for."""

import re
import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
OFFLINE = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


def figures_drawn(page: Path) -> set[str]:
    """Opens a page, checks that every place for a figure was drawn in and nothing fetched; returns the places' ids."""
    # The page's own browser tells what it fetched: every resource that was asked for, answered or not.
    fetched = '`fetched:${performance.getEntriesByType("resource").map(one => one.name)}`'
    tell = f'addEventListener("load", () => {{ document.title = {fetched} }})'
    page.write_text(page.read_text().replace("</body>", f"<script>{tell}</script></body>"))
    flags = [*QUIET, *OFFLINE, "--dump-dom", "--virtual-time-budget=5000", f"--user-data-dir={page.parent / 'profile'}"]
    command = [str(CHROMIUM), *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    places = re.findall(r'class="plot[^"]*" id="([^"]+)"', done.stdout)
    assert done.stdout.count('class="main-svg"') >= len(places)
    assert "<title>fetched:</title>" in done.stdout
    assert "Content Security Policy" not in done.stderr
    return set(places)
