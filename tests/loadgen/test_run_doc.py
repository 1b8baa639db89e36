"""docs/metrics.md names every field of a summary, and no other."""

import re
from pathlib import Path

from loadgen.runs.summary import Summary

DOCS = Path(__file__).parents[2] / "docs"


def fields_in(page: str, heading: str) -> set[str]:
    """Names in the first column of the section's table."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", (DOCS / page).read_text(), re.M | re.S)
    assert section is not None
    cells = re.findall(r"^\| (`.*?) \|", section[1], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_summary_fields() -> None:
    assert fields_in("metrics.md", "A run's summary: `--json` of loadgen and replay") == set(Summary.__struct_fields__)
