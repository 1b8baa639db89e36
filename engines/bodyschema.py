"""Request fields that an engine itself names, in the ``/openapi.json`` of vLLM, SGLang and TensorRT-LLM.

Others are ignored there without a word, or refused. Engines without that page name none.
"""

from collections.abc import Mapping
from typing import Any

from engines.dialect import Control, decoded

PAGE = "/openapi.json"
MOST_REFERENCES = 8
"""References that are followed one from another."""


def known_fields(control: Control, path: str) -> frozenset[str] | None:
    """Return the names of the fields of a POST to ``path``; null: the engine does not tell."""
    page = decoded(control.text(PAGE))
    schema = _at(page, "paths", path, "post", "requestBody", "content", "application/json", "schema")
    return _fields(page, schema, MOST_REFERENCES)


def _fields(page: Any, schema: Any, references: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping):
        return None
    target = schema.get("$ref")
    if isinstance(target, str) and references:
        return _fields(page, _at(page, *target.removeprefix("#/").split("/")), references - 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := schema.get(word), list):
            parts = [_fields(page, part, references) for part in several]
            return None if None in parts else frozenset().union(*(part for part in parts if part is not None))
    properties = schema.get("properties")
    return frozenset(properties) if isinstance(properties, Mapping) else None


def _at(value: Any, *path: str) -> Any:
    """Value at a path of keys; null: there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
