"""The seed figure: turns 2+ of one session load, warm against cold, captured, replayed and forecast, on one page."""

from collections.abc import Sequence
from pathlib import Path

from scripts.fidelity.judging import Judge
from scripts.fidelity.loads import Capture
from scripts.job import Workspace
from scripts.site.browser import take_picture

LOAD = "session-fast"


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
            take_picture(page.as_uri(), page.with_suffix(".png"))
            pages.append(page)
    return pages
