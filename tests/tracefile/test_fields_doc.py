"""docs/fields.md names every field of a record, and no other; the schema has the meaning of each."""

import re
from pathlib import Path

import msgspec

from tracefile.records.schema import Record

TEXT = (Path(__file__).parents[2] / "docs" / "fields.md").read_text(encoding="utf-8")


def test_every_record_field_is_documented_once() -> None:
    table = re.findall(r"^\| [^|]* \| (`.*`) \|$", TEXT, re.MULTILINE)
    named = [name for row in table for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(field.name for field in msgspec.structs.fields(Record) if field.name != "extra")
