"""Request fields that the user sets: sampling, stop strings, and any other as a JSON merge patch (RFC 7396).

A patch joins objects, puts every other value in the place of the load's own, and removes fields that it sets to null.
"""

import argparse
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tracefile import InputError

_PLANNED_PROMPT = "prompts from the flags of the load"
_PLANNED_LENGTH = "output lengths from the flags of the load"
_ONE_OUTPUT = "one output a request, without its prompt"

RESERVED: Mapping[str, str] = {
    "model": "--model",
    "stream": "--no-stream of loadgen",
    **dict.fromkeys(("prompt", "messages", "input", "instructions", "system"), _PLANNED_PROMPT),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"), _PLANNED_LENGTH),
    **dict.fromkeys(("n", "n_cmpl", "best_of", "use_beam_search", "echo"), _ONE_OUTPUT),
}
"""Fields that a plan is made of, and where they come from instead."""

EXPECTED = "expected one object, such as '{\"top_k\": 20}'"

STOP_FIELDS: Mapping[str, str] = {"completions": "stop", "chat": "stop", "messages": "stop_sequences"}
"""Field of the stop strings by API; the Responses API has none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BodyFields:
    """Fields that requests have beside those of the plan."""

    stream: bool = True
    temperature: float | None = None
    """Null, here and below: the load's own, if it has one."""
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The patch of ``--extra-body``."""

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise InputError(f"--temperature: {self.temperature:g}; expected a number of 0 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"--top-p: {self.top_p:g}; expected a number above 0, at most 1")
        if "" in self.stop:
            raise InputError("--stop: empty; expected a text that ends an output")
        for name in self.extra:
            if name in RESERVED:
                raise InputError(f"--extra-body: {name}: part of the plan; expected {RESERVED[name]}")
        for flag, given in (("temperature", self.temperature), ("top_p", self.top_p), ("stop", self.stop or None)):
            if given is not None and flag in self.extra:
                raise InputError(f"--extra-body: {flag}: with --{flag.replace('_', '-')}; expected one of the two")

    def __repr__(self) -> str:
        """JSON for digests and names of loads: equal texts, equal fields."""
        told = (self.stream, self.temperature, self.top_p, self.stop, self.extra)
        return msgspec.json.encode(told, order="deterministic").decode()

    @property
    def priority(self) -> int | None:
        """Priority of every request; null: none given."""
        found = self.extra.get("priority")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    @property
    def given(self) -> bool:
        """True if any field differs from the load's own."""
        return not self.stream or self._patches

    @property
    def _patches(self) -> bool:
        return bool(self.extra or self.stop) or self.temperature is not None or self.top_p is not None

    def check(self, apis: Iterable[str]) -> None:
        """Raise InputError for stop strings on an API without them."""
        for api in apis:
            if self.stop and api not in STOP_FIELDS:
                raise InputError(f"--stop: with --api {api}, which has no such field; expected --api chat")

    def parts(self, api: str) -> dict[str, dict[str, Any]]:
        """Return each flag's own part of the patch, by the words that name it in an error."""
        told = {f"--extra-body: {name}": {name: value} for name, value in self.extra.items()}
        if self.temperature is not None:
            told["--temperature"] = {"temperature": self.temperature}
        if self.top_p is not None:
            told["--top-p"] = {"top_p": self.top_p}
        if self.stop and api in STOP_FIELDS:
            told["--stop"] = {STOP_FIELDS[api]: list(self.stop)}
        return told

    def patch(self, api: str) -> dict[str, Any]:
        """Return the patch of a request's body."""
        if not self._patches:
            return {}
        patch = {name: value for part in self.parts(api).values() for name, value in part.items()}
        if "stop" in patch or "stop_sequences" in patch:
            patch.setdefault("min_tokens", None)  # an engine looks for stop strings only after so many
        return patch

    def words(self) -> list[str]:
        """Return the parts of a start line about the fields."""
        told = self.described()
        whole = ["whole responses"] if told.pop("stream", True) is False else []
        return whole + [f"{name} {msgspec.json.encode(value).decode()}" for name, value in told.items()]

    def described(self) -> dict[str, object]:
        """Fields for a trace's header; texts may be content, and are only told to be there."""
        told = {"stream": None if self.stream else False, "temperature": self.temperature, "top_p": self.top_p}
        told |= {"stop": len(self.stop) or None}
        shown: dict[str, object] = {name: value for name, value in told.items() if value is not None}
        return shown | ({"extra_body": _without_texts(self.extra)} if self.extra else {})


PLAIN = BodyFields()


def merge_patch(fields: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` with a JSON merge patch applied."""
    merged = dict(fields)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            before = merged.get(name)
            merged[name] = merge_patch(before if isinstance(before, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


def replaced_fields(fields: Mapping[str, Any], patch: Mapping[str, Any]) -> list[str]:
    """Names of the load's own fields that a patch changes."""
    merged = merge_patch(fields, patch)
    return [name for name, value in fields.items() if merged.get(name) != value]


def add_body_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("request fields", "sent with every request, beside the load's own").add_argument
    add("--temperature", type=float, metavar="T", help="sampling temperature (default 0; of groups 1)")
    add("--top-p", type=float, metavar="P", help="nucleus sampling's share (default: the engine's)")
    add("--stop", action="append", default=[], metavar="TEXT", help="text that ends an output; may be repeated")
    add(
        "--extra-body",
        metavar="JSON",
        help='further fields, merged into each body, such as {"top_k": 20} (null removes a field); model, '
        "prompts, lengths and stream are refused",
    )


def read_body_fields(args: argparse.Namespace, *, stream: bool = True) -> BodyFields:
    return BodyFields(
        stream=stream,
        temperature=args.temperature,
        top_p=args.top_p,
        stop=tuple(args.stop),
        extra=parse_extra_body(args.extra_body),
    )


def parse_extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"--extra-body: not JSON ({error}); {EXPECTED}") from None
    if not isinstance(found, dict):
        raise InputError(f"--extra-body: a JSON {type(found).__name__}; {EXPECTED}")
    return found


def _without_texts(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _without_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_texts(inner) for inner in value]
    return "…" if isinstance(value, str) else value
