"""docs/fields.md and the schema are one: every field is there, none is made up, and every writer is a known one."""

import re
from pathlib import Path

import msgspec
import pytest

from tracefile.records.schema import Engine, HashInfo, Meta, Record, Workload
from tracefile.storage.segments import Manifest, Segment

TEXT = (Path(__file__).parents[2] / "docs" / "fields.md").read_text(encoding="utf-8")
WRITERS = {"all", "tap", "client", "replay", "sim", "mooncake"}
STRUCTS: dict[str, type[msgspec.Struct]] = {
    "## meta": Meta,
    "### meta.hash": HashInfo,
    "### meta.engine": Engine,
    "### meta.workload": Workload,
    "## segments": Manifest,
    "### segments[]": Segment,
    "## record": Record,
}


def rows(heading: str) -> list[list[str]]:
    """The table rows under a heading, up to the next one of the list above."""
    headings = [re.escape(other) for other in STRUCTS]
    (section,) = re.findall(rf"^{re.escape(heading)}$(.*?)(?=^(?:{'|'.join(headings)})$|\Z)", TEXT, re.M | re.S)
    return [re.split(r"\s+\|\s+", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("heading", STRUCTS)
def test_every_field_has_its_row(heading: str) -> None:
    documented = [row[0].strip("`") for row in rows(heading)]
    fields = [field.name for field in msgspec.structs.fields(STRUCTS[heading]) if field.name != "extra"]
    assert sorted(documented) == sorted(fields)


@pytest.mark.parametrize("heading", STRUCTS)
def test_every_row_is_filled_and_names_known_writers(heading: str) -> None:
    columns = 5 if heading == "## record" else 4
    for row in rows(heading):
        assert len(row) == columns, row
        assert all(row), row
        writers = {name.strip() for name in re.sub(r"\(.*?\)", "", row[-1]).split(",")}
        assert writers <= WRITERS, row


def test_units_are_those_of_the_names() -> None:
    for row in rows("## record"):
        assert (row[1] == "ms") == row[0].strip("`").endswith("_ms"), row
