"""docs/flow.md has one line for every folder of the product."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "flow.md").read_text()
PACKAGES = ("tracefile", "measure", "wire", "engines", "tap", "loadgen", "replay", "sim", "report", "kvtape", "scripts")


def test_every_folder_has_one_line() -> None:
    lines = re.findall(r"^- `([\w/]+)/`: ", PAGE, re.MULTILINE)
    modules = [path for space in PACKAGES for path in (ROOT / space).rglob("*.py")]
    folders = {str(path.parent.relative_to(ROOT)) for path in modules}
    assert sorted(lines) == sorted(folders)
