"""docs/flow.md names only files that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_path_that_the_walk_names_is_there() -> None:
    page = (ROOT / "docs" / "flow.md").read_text()
    named = re.findall(r"`((?:tracefile|measure|wire|engines|tap|loadgen|replay|sim|report)/[\w/]+\.py)`", page)
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]
