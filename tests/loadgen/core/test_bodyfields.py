"""Fields that the user sets: merged as RFC 7396 says, named as each API does, refused where the plan sets them."""

import json
from typing import Any

import pytest

from loadgen.core.bodyfields import BodyFields, merge_patch, parse_extra_body
from tracefile.records.errors import InputError


@pytest.mark.parametrize(
    ("fields", "patch", "merged"),
    [  # The objects of RFC 7396, appendix A.
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merging(fields: dict[str, Any], patch: dict[str, Any], merged: dict[str, Any]) -> None:
    before = json.dumps(fields)
    assert merge_patch(fields, patch) == merged
    assert json.dumps(fields) == before


def test_header_has_fields_and_numbers_but_no_text() -> None:
    fields = BodyFields(stream=False, extra={"a": [{"b": "secret"}], "c": {"d": True, "e": 1.5}})
    assert fields.described() == {
        "stream": False,
        "extra_body": {"a": [{"b": "…"}], "c": {"d": True, "e": 1.5}},
    }
    assert fields.words() == ["no streaming", 'extra_body {"a":[{"b":"…"}],"c":{"d":true,"e":1.5}}']
    assert BodyFields().words() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--extra-body: not JSON"),
        ("[1]", "--extra-body: a JSON list; expected one object"),
        ('{"prompt": "x"}', "--extra-body: prompt: part of the plan; expected the prompts"),
    ],
)
def test_bad_bodies(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BodyFields(extra=parse_extra_body(text))
