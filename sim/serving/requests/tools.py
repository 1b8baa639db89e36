"""Tools that a request offers, and drawn calls of them as output tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sim.serving.requests.errors import ApiError
from sim.serving.requests.vocabulary import Vocabulary

MAX_DEPTH = 6
MAX_ITEMS, MAX_CHARACTERS, MAX_VALUES = 32, 512, 4096
MAX_NUMBER = float(1 << 53)
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "juniper", "kelp", "lark")
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an output may call."""

    name: str
    parameters: Any
    """Its arguments as JSON Schema; anything but an object: none."""
    is_named: bool = False
    """The request asked for this very tool."""


def tools_of(functions: Iterable[Any]) -> list[Tool]:
    """Return the functions that have a name."""
    return [
        Tool(function["name"], function.get("parameters"))
        for function in functions
        if isinstance(function, dict) and isinstance(function.get("name"), str)
    ]


def named_choice(function: Any) -> str:
    """Return the name of the function that a request asks for."""
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError("tool_choice: expected none, auto, required or a function's name", param="tool_choice")
    return name


def draw_arguments(schema: Any, seed: int) -> dict[str, Any]:
    """Return arguments that a schema allows, as far as its keywords are plain; none for a value that is no schema."""
    draws = _Draws(np.random.default_rng(seed))
    try:
        value = _draw(schema, schema, draws, 0) if isinstance(schema, dict) else {}
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class _Draws:
    """Random numbers of one call, and the values that it may still have."""

    random: np.random.Generator
    left: int = MAX_VALUES

    def take(self) -> None:
        """Count one value; raises ValueError above the bound: a schema that contains itself asks for billions."""
        self.left -= 1
        if self.left < 0:
            raise ValueError("too many values")


def _draw(schema: Any, root: Any, draws: _Draws, depth: int) -> Any:
    draws.take()
    schema = _resolve(schema, root, depth)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return _pick(schema["enum"], draws)
    kind = _kind(schema)
    if kind == "object":
        return _draw_object(schema, root, draws, depth)
    if kind == "array":
        return _draw_array(schema, root, draws, depth)
    return _draw_scalar(kind, schema, draws)


def _draw_array(schema: dict[str, Any], root: Any, draws: _Draws, depth: int) -> list[Any]:
    least = min(int(schema.get("minItems", 1)), MAX_ITEMS)
    count = max(least, min(2, int(schema.get("maxItems", 2)))) if depth < MAX_DEPTH else least
    return [_draw(schema.get("items", {}), root, draws, depth + 1) for _ in range(count)]


def _draw_scalar(kind: str, schema: dict[str, Any], draws: _Draws) -> Any:
    if kind in ("integer", "number"):
        return _draw_number(schema, draws, whole=kind == "integer")
    if kind == "boolean":
        return bool(draws.random.integers(2))
    return None if kind == "null" else _draw_text(schema, draws)


def _resolve(schema: Any, root: Any, depth: int) -> dict[str, Any]:
    """Follow a reference, take the first of alternatives."""
    if not isinstance(schema, dict) or depth > 2 * MAX_DEPTH:
        return {}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name, {}) if isinstance(target, dict) else {}
        return _resolve(target, root, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return _resolve(schema[name][0], root, depth + 1)
    return schema


def _kind(schema: dict[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind in _TYPES:
        return str(kind)
    return "object" if "properties" in schema else "string"


def _draw_object(schema: dict[str, Any], root: Any, draws: _Draws, depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    required = set(schema.get("required") or ())
    drawn = {}
    for name, inner in (properties if isinstance(properties, dict) else {}).items():
        if name in required or (depth < MAX_DEPTH and draws.random.integers(2)):
            drawn[name] = _draw(inner, root, draws, depth + 1)
    return drawn


def _draw_number(schema: dict[str, Any], draws: _Draws, *, whole: bool) -> int | float:
    low = float(schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1))
    high = float(schema.get("maximum", schema.get("exclusiveMaximum", low + 101) - 1))
    share = float(draws.random.random())
    value = min(max(low + share * max(high - low, 0.0), -MAX_NUMBER), MAX_NUMBER)
    return int(value) if whole else round(value, 2)


def _draw_text(schema: dict[str, Any], draws: _Draws) -> str:
    words = [str(_pick(_WORDS, draws)) for _ in range(1 + int(draws.random.integers(3)))]
    text = " ".join(words).ljust(min(int(schema.get("minLength", 0)), MAX_CHARACTERS), ".")
    longest = schema.get("maxLength")
    return text if longest is None else text[: int(longest)]


def _pick(values: Sequence[Any], draws: _Draws) -> Any:
    return values[int(draws.random.integers(len(values)))]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one tool."""

    call_id: str
    name: str
    arguments: str
    is_named: bool
    """The request asked for this very tool."""
    token_ids: list[int]
    name_tokens: int
    """So many tokens say which tool it is; none of them is part of the arguments."""
    argument_tokens: int
    """So many follow that are the arguments; the rest only closes the call."""

    def fragment(self, vocabulary: Vocabulary, token_ids: Sequence[int], start: int, stop: int) -> str:
        """The piece of the arguments that tokens ``start`` to ``stop`` of an output spell; blanks behind included."""
        first = max(start, self.name_tokens)
        closing = range(self.name_tokens + self.argument_tokens, len(self.token_ids))
        said = [token_ids[place] for place in range(first, stop) if place not in closing]
        return vocabulary.decode(said) if said else ""


def draw_call(tool: Tool, vocabulary: Vocabulary, seed: int) -> ToolCall:
    # ASCII, so that no token ends within a character; compact, as it comes back from clients that parse it.
    arguments = _ascii(msgspec.json.encode(draw_arguments(tool.parameters, seed)).decode())
    before, spelled, after = vocabulary.spell_call(tool.name, arguments)
    call_id = f"call_{seed:016x}"
    return ToolCall(
        call_id, tool.name, arguments, tool.is_named, [*before, *spelled, *after], len(before), len(spelled)
    )


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    units = text.encode("utf-16-be")
    codes = [int.from_bytes(units[place : place + 2], "big") for place in range(0, len(units), 2)]
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)
