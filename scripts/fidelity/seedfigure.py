"""The seed figure: turns 2+ of one session load, warm against cold, captured, replayed and forecast, on one page."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts.fidelity.judging import Judge
from scripts.fidelity.loads import Capture
from scripts.job import Workspace

LOAD = "session-fast"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def draw_seed_figures(captures: Path, out: Path, wanted: Sequence[Capture]) -> list[Path]:
    """A page for every model whose session load was captured warm and cold, and a picture of it where there is a
    browser."""
    pages: list[Path] = []
    for shape in dict.fromkeys(capture.shape for capture in wanted):
        judge = Judge(captures, out, shape, Workspace(out / "judged"))
        if judge.is_there(LOAD) and judge.is_there(LOAD, "uncached"):
            page = out / f"{shape}-seed-figure.html"
            flags = judge.repeats(LOAD, "warm")
            if judge.is_there(LOAD, "replayed"):
                flags += ["--also", f"replayed={judge.trace(LOAD, 'replayed')}"]
            judge.validate(
                "seed figure", LOAD, "warm", [*flags, "--cold", judge.trace(LOAD, "uncached"), "--html", page]
            )
            picture(page)
            pages.append(page)
    return pages


def picture(page: Path, width_px: int = 1100, height_px: int = 900) -> Path | None:
    """The top of a page as a PNG beside it; null: there is no browser."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        return None
    image = page.with_suffix(".png")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
    size = f"--window-size={width_px},{height_px}"
    subprocess.run([browser, *flags, size, f"--screenshot={image}", page.as_uri()], check=True, capture_output=True)
    return image
