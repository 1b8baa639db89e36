"""Which engine a target is, asked of itself: what its models say owns them, its metrics, its own endpoints.

Sources: ``owned_by`` is "vllm", "sglang", "llamacpp" and "tensorrt_llm" in the engines' own model lists; metrics' names
begin with the engine's; ``/props`` with ``build_info`` is llama.cpp's, ``/server_info`` (before: ``/get_server_info``)
with ``internal_states`` SGLang's. A router may answer all of this for itself: then it is taken for what it says it is,
and ``--dialect`` says what stands behind it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from engines.control import ControlClient
from engines.dialects import AUTO, DIALECTS, LLAMA_CPP, OPENAI, SGLANG, TENSORRT_LLM, VLLM, Dialect
from tracefile import InputError

OWNERS: Mapping[str, Dialect] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMA_CPP,
    "tensorrt_llm": TENSORRT_LLM,
}
METRIC_PREFIXES: Mapping[str, Dialect] = {
    "vllm:": VLLM,
    "sglang:": SGLANG,
    "llamacpp:": LLAMA_CPP,
}


@dataclass(frozen=True, slots=True)
class Recognised:
    """A target's dialect, and how it was found."""

    dialect: Dialect
    evidence: str
    """For people; empty: it was given."""
    certain: bool = True
    """Whether something said so: without, nothing but the plain API may be taken for granted."""


def find_dialect(control: ControlClient, asked: str) -> Recognised:
    """The dialect that was asked for, or for ``auto`` the target's own. Raises InputError for one that is none."""
    if asked != AUTO:
        for name, dialect in DIALECTS.items():
            if asked == name:
                return Recognised(dialect, "")
        raise InputError(f"--dialect: {asked!r}; expected one of {AUTO}, {', '.join(DIALECTS)}")
    return _by_models(control) or _by_metrics(control) or _by_endpoints(control) or _plain()


def recognition_notes(found: Recognised) -> list[str]:
    """What a reader of the results must know of how the engine was told what to do."""
    notes = [f"--dialect auto: {found.dialect.name}, {found.evidence}"] if found.evidence else []
    if not found.dialect.exact_lengths:
        notes.append(f"dialect {found.dialect.name}: answers may end early; --dialect says what the engine really is")
    return notes


def _by_models(control: ControlClient) -> Recognised | None:
    dialect = OWNERS.get(_owner(control.text("/v1/models")))
    return None if dialect is None else Recognised(dialect, "as /v1/models says")


def _by_metrics(control: ControlClient) -> Recognised | None:
    names = {line.split(maxsplit=1)[0] for line in control.text("/metrics").splitlines() if line[:1] not in {"", "#"}}
    for prefix, dialect in METRIC_PREFIXES.items():
        if any(name.startswith(prefix) for name in names):
            return Recognised(dialect, f"its metrics are {prefix}…")
    return None


def _by_endpoints(control: ControlClient) -> Recognised | None:
    if "build_info" in _object(control.text("/props")):
        return Recognised(LLAMA_CPP, "it has llama.cpp's /props")
    for path in ("/server_info", "/get_server_info"):
        if "internal_states" in _object(control.text(path)):
            return Recognised(SGLANG, f"it has SGLang's {path}")
    return None


def _plain() -> Recognised:
    return Recognised(OPENAI, "nothing says which engine it is", certain=False)


def _owner(models: str) -> str:
    listed = _object(models).get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    owner = first.get("owned_by") if isinstance(first, dict) else None
    return owner if isinstance(owner, str) else ""


def _object(text: str) -> dict[str, object]:
    """The JSON object in a text; empty if there is none."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
