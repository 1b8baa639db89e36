"""Files of the site: the repository's pages under their own paths, so that their links hold, and generated ones.

MkDocs reads one folder. Here ``README.md``, ``docs/``, ``deploy/`` and others keep their places to one another, as on a
code host, and only the addresses are shorter: ``docs/tap.md`` is ``tap.html``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.site.python_api import api_page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
BESIDE = ("*.md", "deploy/**/*", "data/captures/*.md", "data/grids/*")
"""Files outside docs/ that its pages link to."""
ASSETS = {"assets/iframe-worker.js": "iframe-worker.js", "assets/site.css": "site.css"}


def address(path: str) -> str:
    """Where a file of the repository is on the site: ``docs/tap.md`` at ``tap.html``."""
    if not path.endswith(".md"):
        return path.removeprefix("docs/")
    stem = re.sub(r"(^|/)README$", r"\1index", path.removesuffix(".md").removeprefix("docs/"))
    return f"{stem}.html"


def own_files() -> Iterator[Path]:
    """Pages and other files of the repository that are on the site."""
    yield from sorted(path for path in (ROOT / "docs").rglob("*") if path.is_file())
    for pattern in BESIDE:
        yield from sorted(path for path in ROOT.glob(pattern) if path.is_file())


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Add the engineering notes that the navigation does not name: a new one needs no entry."""
    [notes] = [part["Engineering notes"] for part in config.nav or () if "Engineering notes" in part]
    found = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs" / "dev").glob("*.md")))
    notes += [page for page in found if page not in str(config.nav)]
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Replace the files of docs/ by the site's; the theme's stay."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only a build has it

    def added(path: str, **content: Any) -> "File":
        made = File.generated(config, path, **content)
        made.dest_uri = address(path)
        files.append(made)
        return made

    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in own_files():
        added(str(path.relative_to(ROOT)), abs_src_path=str(path))
    for name, source in ASSETS.items():
        added(name, abs_src_path=str(Path(__file__).parent / source))
    added("docs/api.md", content=api_page())
    return files


def on_page_markdown(markdown: str, page: "Page", **_: Any) -> str:
    """The page's text as it is; the first page alone has no sidebar."""
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation"]
    return markdown
