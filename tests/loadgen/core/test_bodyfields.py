"""Fields that the user sets: merged as RFC 7396 says, named as each API does, refused where the plan sets them."""

import json
from typing import Any

import pytest

from loadgen.core.bodyfields import BodyFields, merge_patch, parse_extra_body, replaced_fields
from tracefile import InputError


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


def test_each_api_has_its_own_names() -> None:
    fields = BodyFields(temperature=0.5, top_p=0.9, stop=("a", "b"), extra={"top_k": 3})
    common = {"top_k": 3, "temperature": 0.5, "top_p": 0.9, "min_tokens": None}
    assert fields.patch("completions") == fields.patch("chat") == {**common, "stop": ["a", "b"]}
    assert fields.patch("messages") == {**common, "stop_sequences": ["a", "b"]}
    fields.check(["completions", "chat", "messages"])
    with pytest.raises(InputError, match="--stop: with --api responses, which has no such field"):
        fields.check(["chat", "responses"])


def test_stop_strings_count_from_the_first_token() -> None:
    assert "min_tokens" not in BodyFields(temperature=1.0).patch("chat")
    assert BodyFields(extra={"stop": "x", "min_tokens": 5}).patch("chat") == {"stop": "x", "min_tokens": 5}


def test_a_header_tells_fields_and_numbers_but_no_text() -> None:
    fields = BodyFields(stream=False, stop=("secret",), extra={"a": [{"b": "secret"}], "c": {"d": True, "e": 1.5}})
    assert fields.described() == {
        "stream": False,
        "stop": 1,
        "extra_body": {"a": [{"b": "…"}], "c": {"d": True, "e": 1.5}},
    }
    assert fields.words() == ["whole responses", "stop 1", 'extra_body {"a":[{"b":"…"}],"c":{"d":true,"e":1.5}}']
    assert BodyFields().words() == []


def test_equal_fields_have_one_name() -> None:
    texts = ('{"a": 1, "b": {"c": 2, "d": 3}}', '{"b": {"d": 3, "c": 2}, "a": 1}')
    one, other = (BodyFields(extra=json.loads(text)) for text in texts)
    assert repr(one) == repr(other) != repr(BodyFields(extra={"a": 1}))


def test_replaced_fields_are_named() -> None:
    own = {
        "max_tokens": 4,
        "min_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    assert replaced_fields(own, {"ignore_eos": True, "top_k": 2}) == []
    assert replaced_fields(own, {"ignore_eos": False, "min_tokens": None}) == ["min_tokens", "ignore_eos"]
    assert replaced_fields(own, {"stream_options": {"continuous_usage_stats": True}}) == ["stream_options"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--extra-body: not JSON"),
        ("[1]", "--extra-body: a JSON list; expected one object"),
        ('{"a": NaN}', "--extra-body: not JSON"),
        ('{"prompt": "x"}', "--extra-body: prompt: part of the plan; expected prompts"),
        ('{"messages": []}', "--extra-body: messages: part of the plan"),
        ('{"stream": false}', "--extra-body: stream: part of the plan; expected --no-stream"),
        ('{"max_tokens": 5}', "--extra-body: max_tokens: part of the plan; expected output lengths"),
        ('{"model": "x"}', "--extra-body: model: part of the plan; expected --model"),
        ('{"n": 2}', "--extra-body: n: part of the plan; expected one output"),
    ],
)
def test_bad_bodies(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BodyFields(extra=parse_extra_body(text))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "--temperature: -1; expected"),
        ({"temperature": float("nan")}, "--temperature: nan; expected"),
        ({"top_p": 0.0}, "--top-p: 0; expected"),
        ({"top_p": 1.5}, "--top-p: 1.5; expected"),
        ({"stop": ("",)}, "--stop: empty"),
        ({"temperature": 1.0, "extra": {"temperature": 0}}, "--extra-body: temperature: with --temperature"),
        ({"stop": ("a",), "extra": {"stop": "b"}}, "--extra-body: stop: with --stop"),
    ],
)
def test_bad_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BodyFields(**fields)
