"""Calls of tools: arguments that the schema allows, and tokens that spell them, whichever vocabulary it is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.serving.requests.output import OutputLimits, draw_output
from sim.serving.requests.tools import Tool, draw_arguments, draw_call
from sim.serving.requests.vocabulary import PieceVocabulary, TokenizerVocabulary, Vocabulary
from tests.fakes.vocabularies import package_folder

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "ünit": {"enum": ["°C", "°F", "日"]},
        "days": {"type": "integer", "minimum": 2, "maximum": 4},
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        "when": {"type": ["null", "string"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 1},
        "tree": {"$ref": "#/$defs/tree"},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "ünit", "days", "share", "when", "tags", "sure"],
    "$defs": {
        "tag": {"oneOf": [{"const": 7}, {"type": "string"}]},
        "tree": {"type": "object", "properties": {"child": {"$ref": "#/$defs/tree"}}, "required": ["child"]},
    },
}


@pytest.fixture(scope="module", params=["pieces", "tokenizer"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    if request.param == "pieces":
        return PieceVocabulary()
    return TokenizerVocabulary(package_folder("deepseek"))


@given(st.integers(0, 2**64 - 1))
def test_drawn_arguments_keep_to_their_schema(seed: int) -> None:
    # "tree" demands itself for ever: no value can have it, and drawing one ends all the same.
    drawn = draw_arguments(SCHEMA, seed)
    assert drawn.keys() - {"tree"} == set(SCHEMA["required"])
    assert 1 <= len(drawn["city"]) <= 4
    assert drawn["ünit"] in ("°C", "°F", "日")
    assert drawn["days"] in (2, 3, 4)
    assert 0 <= drawn["share"] <= 2
    assert drawn["when"] is None
    assert drawn["tags"] == [7]
    assert isinstance(drawn["sure"], bool)
    assert draw_arguments(SCHEMA, seed) == drawn


MANY = {"type": "array", "minItems": 32, "items": {"$ref": "#/$defs/x"}}


def test_a_number_fits_into_64_bits(vocabulary: Vocabulary) -> None:
    schema = {"properties": {"a": {"type": "integer", "minimum": 1e30}}, "required": ["a"]}
    assert draw_call(Tool("f", schema), vocabulary, 1).arguments == '{"a":9007199254740992}'


@pytest.mark.parametrize(
    "schema",
    [
        None,
        True,
        [],
        {},
        {"type": "string"},
        {"type": "object"},
        {"properties": 3},
        {"properties": {"a": {"type": "integer", "minimum": "x"}}, "required": ["a"]},
        {"type": "object", "required": 5},
        {"properties": {"a": {"enum": {"x": 1}}}, "required": ["a"]},
        {"properties": {"a": {"anyOf": {"x": 1}}}, "required": ["a"]},
        # 32 to the power of 12 values.
        {"$defs": {"x": MANY}, "properties": {"a": MANY}, "required": ["a"]},
    ],
)
def test_a_tool_without_a_usable_schema_takes_no_arguments(schema: Any) -> None:
    assert draw_arguments(schema, 1) == {}


def test_a_calls_tokens_spell_its_arguments_wherever_they_are_cut(vocabulary: Vocabulary) -> None:
    call = draw_call(Tool("weather", SCHEMA), vocabulary, 5)
    assert json.loads(call.arguments).keys() >= set(SCHEMA["required"])
    assert call.arguments.isascii()
    ids, count = call.token_ids, len(call.token_ids)
    for size in (1, 2, 3, 7, count):
        cuts = range(0, count, size)
        pieces = [call.fragment(vocabulary, ids, start, min(start + size, count)) for start in cuts]
        assert "".join(pieces) == call.arguments
    assert call.fragment(vocabulary, ids, 0, call.name_tokens) == ""


def test_an_answer_is_the_call_as_long_as_it_may_be(vocabulary: Vocabulary) -> None:
    tool = Tool("weather", SCHEMA)
    free = draw_output(b"abcd", vocabulary, OutputLimits(max_tokens=1000), 1, 0, tool=tool)
    assert free.call is not None
    assert free.token_ids == [*free.call.token_ids, vocabulary.end_id]
    assert free.finish_reason == "stop"
    cut = draw_output(b"abcd", vocabulary, OutputLimits(max_tokens=9), 1, 0, tool=tool)
    assert (cut.token_ids, cut.finish_reason) == (free.token_ids[:9], "length")
    count = len(free.call.token_ids)
    long = draw_output(b"abcd", vocabulary, OutputLimits(max_tokens=count + 5, ignore_eos=True), 1, 0, tool=tool)
    assert (len(long.token_ids), long.finish_reason) == (count + 5, "length")
    assert long.call is not None
    said = long.call.fragment(vocabulary, long.token_ids, 0, len(long.token_ids))
    assert json.loads(said) == json.loads(free.call.arguments)
    at_least = draw_output(b"abcd", vocabulary, OutputLimits(max_tokens=1000, min_tokens=count + 9), 1, 0, tool=tool)
    assert (len(at_least.token_ids), at_least.finish_reason) == (count + 10, "stop")
