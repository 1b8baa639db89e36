"""Reasons for an engine that refuses every request, and fields that it would ignore; never quotes the engine."""

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from engines.access import REFUSED
from engines.control import ControlClient
from engines.dialect import Control, Dialect, decoded
from loadgen.core.bodies import completions_body
from loadgen.core.bodyfields import BodyFields, replaced_fields
from loadgen.core.vocabulary import Vocabulary
from loadgen.text.spoken import PATHS, Api, SentMessage, conversation_body, own_fields
from tracefile import InputError

HTTP_ERROR = 400
PAGE = "/openapi.json"
"""Page of vLLM, SGLang and TensorRT-LLM with the fields that they know; others are ignored there, or refused."""
MOST_REFERENCES = 8
"""References that are followed one from another."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Form of a run's requests, as far as an engine may refuse it."""

    api: Api
    fields: BodyFields
    dialect: Dialect
    vocabulary: Vocabulary
    lengths: str = "--prompt-tokens, --output-tokens"
    """Name of what decides the lengths, for errors."""

    @property
    def path(self) -> str:
        return self.dialect.path if self.api == "completions" else PATHS[self.api]

    def small(self, model: str, *, stream: bool, patch: Mapping[str, Any]) -> bytes:
        """Body of a short request."""
        if self.api == "completions":
            ids = np.array([self.vocabulary.low, self.vocabulary.high - 1], dtype=np.uint32)
            return completions_body(model, ids, 1, stream=stream, extra=patch, dialect=self.dialect)
        said = [SentMessage("user", "hi")]
        return conversation_body(self.api, model, said, 1, stream=stream, extra=patch, dialect=self.dialect)


def check_fields(control: ControlClient, asked: Asked) -> None:
    """Raise InputError for a field that is none of the engine's, as far as it names them."""
    parts = asked.fields.parts(asked.api)
    known = known_fields(control, asked.path) if parts else None
    for flag, part in parts.items() if known else ():
        for name in part.keys() - (known or frozenset()):
            near = difflib.get_close_matches(name, known or (), n=1)
            raise InputError(
                f"{flag}: no field of {asked.path} in the engine's {PAGE}, which would ignore it; expected "
                + (f"{near[0]}, or another of its fields" if near else "one of its fields")
            )


def field_notes(asked: Asked, statuses_unread: int) -> list[str]:
    """``statuses_unread``: responses that were no JSON."""
    fields, api = asked.fields, asked.api
    notes = []
    own = own_fields(api, "", 1, stream=fields.stream, dialect=asked.dialect)
    if replaced := replaced_fields(own, fields.extra):
        notes.append(f"--extra-body: {', '.join(replaced)} in place of the load's own")
    if not fields.stream:
        notes.append("--no-stream: responses come whole, so there is no TTFT and no ITL")
        if statuses_unread:
            notes.append(f"--no-stream: {statuses_unread} responses are not JSON; does the engine stream all the same?")
    return notes


def refusal(control: ControlClient, model: str, asked: Asked, errors: Counter[str]) -> str:
    """Likely reason for an engine that refuses every request, with these errors."""
    return _refused_field(control, model, asked) or _refused_prompt(control, model, asked, errors)


def _refused_prompt(control: ControlClient, model: str, asked: Asked, errors: Counter[str]) -> str:
    vocabulary = asked.vocabulary
    if errors["http_413"]:
        return (
            f"{asked.lengths}: the requests are too large for the server (HTTP 413); expected shorter ones, or a "
            "higher limit of a gateway (nginx: client_max_body_size)"
        )
    body = msgspec.json.encode({"model": model, "prompt": [vocabulary.low, vocabulary.high - 1], "max_tokens": 1})
    response = control.post("/v1/completions", body)
    if refused := [status for status in REFUSED if errors[f"http_{status}"]]:
        return f"--url: {control.url}: {response.refusal or control.access.refusal(refused[0])}"
    if response.is_success:
        return (
            f"{asked.lengths}: the engine refuses these requests but takes a short one of the same vocabulary; "
            f"expected lengths within its context{_context(control)}"
        )
    plain = control.post("/v1/completions", msgspec.json.encode({"model": model, "prompt": [1], "max_tokens": 1}))
    if plain.is_success:
        return (
            f"--vocab-high: the engine refuses token ids of {vocabulary.low} … {vocabulary.high - 1} "
            f"(HTTP {response.status}); expected ids of its own vocabulary"
        )
    if plain.refusal:
        return f"--url: {control.url}: {plain.refusal}"
    return _refused_ids(control, model, plain.status)


def _context(control: ControlClient) -> str:
    most = control.facts().engine.max_model_len
    return "" if most is None else f" of {most:,} tokens, prompt and output together (max_model_len)"


def _refused_ids(control: ControlClient, model: str, status: int) -> str:
    text = control.post("/v1/completions", msgspec.json.encode({"model": model, "prompt": "a", "max_tokens": 1}))
    if text.is_success:
        return (
            f"--api completions: the engine takes text, no token ids (HTTP {status}); expected --api chat, with "
            "--tokenizer PATH for exact lengths"
        )
    return f"--url, --model: the engine refuses /v1/completions (HTTP {status}); expected an engine serving it"


def _refused_field(control: ControlClient, model: str, asked: Asked) -> str | None:
    """Name a flag without which a short request is taken; null: it is not a flag's fault."""

    def status(*, stream: bool = True, patch: Mapping[str, Any] = {}) -> int:
        return control.post(asked.path, asked.small(model, stream=stream, patch=patch)).status

    if not asked.fields.given or status() >= HTTP_ERROR:
        return None
    if not asked.fields.stream and (code := status(stream=False)) >= HTTP_ERROR:
        return f"--no-stream: the engine refuses it (HTTP {code}); expected an engine that responds in one piece"
    for flag, part in asked.fields.parts(asked.api).items():
        if (code := status(patch=part)) >= HTTP_ERROR:
            return f"{flag}: the engine refuses it (HTTP {code}); expected a field and value that {asked.path} takes"
    return None


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
