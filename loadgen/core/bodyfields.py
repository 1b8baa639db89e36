"""Extra request fields from the user: a JSON merge patch (RFC 7396), ``--extra-body``, and ``--no-stream``.

A patch merges objects, replaces other values of the load, and removes fields that it sets to null.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tracefile.records.errors import InputError

_PLANNED_PROMPT = "the prompts of the load"
_PLANNED_LENGTH = "the output lengths of the load"
_SINGLE_OUTPUT = "no such field: a request has one output"

RESERVED: Mapping[str, str] = {
    "model": "--model",
    "stream": "--no-stream of loadgen",
    **dict.fromkeys(("prompt", "messages", "input", "instructions", "system"), _PLANNED_PROMPT),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"), _PLANNED_LENGTH),
    **dict.fromkeys(("n", "n_cmpl", "best_of", "use_beam_search", "echo"), _SINGLE_OUTPUT),
}
"""Fields that the plan sets, and the flag that sets each."""

EXPECTED = "expected one object, such as '{\"top_k\": 20}'"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BodyFields:
    """Request fields besides prompt, model and token limits."""

    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Merge patch of ``--extra-body``."""

    def __post_init__(self) -> None:
        for name in self.extra:
            if name in RESERVED:
                raise InputError(f"--extra-body: {name}: part of the plan; expected {RESERVED[name]}")

    def __repr__(self) -> str:
        """JSON for digests and load names: equal texts, equal fields."""
        return msgspec.json.encode((self.stream, self.extra), order="deterministic").decode()

    @property
    def priority(self) -> int | None:
        """Scheduler priority of all requests; null: not set."""
        value = self.extra.get("priority")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def customised(self) -> bool:
        """True if a field differs from the load's default."""
        return not self.stream or bool(self.extra)

    def patch(self) -> dict[str, Any]:
        """Return the merge patch of a request body."""
        patch = dict(self.extra)
        if "stop" in patch or "stop_sequences" in patch:
            patch.setdefault("min_tokens", None)  # engines check stop strings only after min_tokens
        return patch

    def words(self) -> list[str]:
        """Return the parts of the start line that describe the fields."""
        patch = [f"extra_body {msgspec.json.encode(_without_texts(self.extra)).decode()}"] if self.extra else []
        return [*([] if self.stream else ["no streaming"]), *patch]

    def described(self) -> dict[str, object]:
        """Fields for a trace header; string values may be content, so only their presence is recorded."""
        stream: dict[str, object] = {} if self.stream else {"stream": False}
        return stream | ({"extra_body": _without_texts(self.extra)} if self.extra else {})


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


def parse_extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"--extra-body: not JSON ({error}); {EXPECTED}") from None
    if not isinstance(value, dict):
        raise InputError(f"--extra-body: a JSON {type(value).__name__}; {EXPECTED}")
    return value


def _without_texts(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _without_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_texts(inner) for inner in value]
    return "…" if isinstance(value, str) else value
