"""Make the pictures of docs/ again: a comparison and a terminal. ``python -m scripts.site.pictures``.

Those of docs/fleet.md and docs/capacity.md are made by the commands beside them (``--images``), the seed figure of
docs/dev/results.md by ``python -m scripts.matrix judge``.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path

from scripts.site.browser import take_picture
from scripts.site.gallery import FIRST_PX, ROOT, make_gallery

DOCS = ROOT / "docs"
FRAME = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0; background: #1e1e2e; color: #cdd6f4 }}
pre {{ margin: 0; padding: 18px 22px; font: 14px/1.4 "DejaVu Sans Mono", monospace }} b {{ color: #a6e3a1 }}</style>
<pre>{}</pre>
"""
LINE_PX, COLUMN_PX, EDGE_PX = 19.6, 8.43, 44
SHOWN = (
    "sim curve data/captures/128x2/session-fast.jsonl.zst",
    "sim misses data/captures/128x2/session-fast.jsonl.zst --num-gpu-blocks 701",
)


def terminal_picture(image: Path) -> None:
    """Commands and their output as in a terminal."""
    shown: list[str] = []
    for command in SHOWN:
        words = [sys.executable, "-m", *command.split()]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        shown += [f"<b>$</b> {escape(command)}", *escape(done.stdout.rstrip()).splitlines(), ""]
    lines = shown[:-1]
    width = max(len(line.replace("<b>", "").replace("</b>", "")) for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "terminal.html"
        page.write_text(FRAME.format("\n".join(lines)))
        take_picture(page.as_uri(), image, round(width * COLUMN_PX) + EDGE_PX, round(len(lines) * LINE_PX) + EDGE_PX)


def report_picture(image: Path) -> None:
    """The gallery's comparison: captured, replayed and predicted."""
    folder = ROOT / "out" / "gallery"
    make_gallery(folder)
    take_picture((folder / "compare.html").as_uri(), image, *FIRST_PX)


PICTURES: dict[str, Callable[[Path], None]] = {
    "report.png": report_picture,
    "terminal.png": terminal_picture,
}


def main() -> None:
    """Make all pictures, or those named."""
    parser = argparse.ArgumentParser(description="Make the pictures of docs/ again.")
    parser.add_argument("name", nargs="*", choices=[*PICTURES, []], help="a picture (default: all)")
    for name in parser.parse_args().name or PICTURES:
        print(f"docs/{name}", flush=True)
        PICTURES[name](DOCS / name)


if __name__ == "__main__":
    main()
