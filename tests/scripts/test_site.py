"""The documentation site: pages made from the code, every page in the navigation, nothing fetched from a network."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvtape
from scripts.site.hooks import own_files
from scripts.site.python_api import api_page

ROOT = Path(__file__).parent.parent.parent
GENERATED = {"docs/api.md"}


def test_the_python_api_has_every_name_its_signature_and_its_docstring() -> None:
    page = api_page()
    assert re.findall(r"^### `(\w+)`", page, re.MULTILINE).count("forecast") == 1
    assert {name for name in kvtape.__all__ if f"### `{name}`\n" not in page} == set()
    assert "kvtape.read_run(trace: str | os.PathLike[str]) -> Run" in page
    assert "    *,\n    bootstrap: int = 500,\n    seed: int = 0,\n) -> Compared" in page
    assert "| `cached_tokens` | `IntArray` | UNKNOWN: not reported; 0: a miss. |" in page


def navigation(found: Any) -> list[str]:
    """Pages of a part of the navigation."""
    if isinstance(found, str):
        return [found]
    return [page for one in (found.values() if isinstance(found, dict) else found) for page in navigation(one)]


def test_every_page_is_in_the_navigation_once() -> None:
    """Engineering notes without an entry are added when the site is built."""
    pages = navigation(yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"])
    own = {str(path.relative_to(ROOT)) for path in own_files() if path.suffix == ".md"}
    notes = {page for page in own if page.startswith("docs/dev/")} - set(pages)
    assert sorted([*pages, *notes]) == sorted(own | GENERATED)


@pytest.mark.docs
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    pages = {path: path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    fetched = r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
    assert not [path for path, text in pages.items() if re.search(fetched, text)]
    assert not [
        path
        for path in (tmp_path / "site").rglob("*.css")
        if re.search(r"url\(\"?(?:https?:)?//|@import", path.read_text())
    ]
    index = (tmp_path / "site" / "search" / "search_index.js").read_text()
    assert all(f'"location":"{page}.html"' in index for page in ("tutorial", "api", "dev/results"))
