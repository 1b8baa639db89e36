"""docs/flow.md has a line for every module, and none for one that is gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ["tracefile", "wire", "tap", "loadgen", "replay", "sim", "report"]
UNLISTED = {"__init__.py", "__main__.py"}


def test_every_module_has_a_line() -> None:
    page = (ROOT / "docs" / "flow.md").read_text()
    for package in PACKAGES:
        section = page.split(f"\n### `{package}/`\n")[1].split("\n### ")[0]
        listed = re.findall(r"^- `([\w/]+\.py)`: \S", section, re.MULTILINE)
        present = [path for path in (ROOT / package).rglob("*.py") if path.name not in UNLISTED]
        assert sorted(listed) == sorted(str(path.relative_to(ROOT / package)) for path in present)


def test_every_path_that_the_walk_names_is_there() -> None:
    page = (ROOT / "docs" / "flow.md").read_text()
    named = re.findall(r"`((?:tracefile|wire|tap|loadgen|replay|sim|report)/\w+\.py)`", page)
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]
