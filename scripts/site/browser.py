"""Pictures of pages by a headless browser."""

import shutil
import subprocess
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str | None:
    """Path of an installed browser; None: there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def take_picture(url: str, image: Path, width_px: int = 1100, height_px: int = 900) -> bool:
    """Write the top of a page as a PNG file; False: there is no browser."""
    found = browser()
    if found is None:
        return False
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
    size = f"--window-size={width_px},{height_px}"
    subprocess.run([found, *flags, size, f"--screenshot={image}", url], check=True, capture_output=True)
    return True
