"""Known engines, and the recognition of a target as one of them.

Evidence, in this order: ``owned_by`` in the model list, the beginning of its metrics' names, pages that only one engine
serves. A router may answer for itself and is taken for the engine it names; ``--dialect`` then names the real engine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from engines.dialect import OPENAI, Control, Dialect, DialectName, decoded
from engines.llamacpp import LLAMA_CPP
from engines.sglang import SGLANG
from engines.trtllm import TENSORRT_LLM
from engines.vllm import VLLM
from tracefile.records.errors import InputError

DIALECTS: Mapping[DialectName, Dialect] = {
    dialect.name: dialect for dialect in (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM, OPENAI)
}
AUTO = "auto"
CHOICES = (AUTO, *get_args(DialectName))


@dataclass(frozen=True, slots=True)
class Recognised:
    """A target's dialect and the evidence for it."""

    dialect: Dialect
    evidence: str
    """For a note; empty: the user named the dialect."""
    certain: bool = True
    """False: no evidence, so only the plain API may be relied on."""


def find_dialect(control: Control, asked: str) -> Recognised:
    """Return the dialect asked for, or for ``auto`` the target's own. Raises InputError for an unknown name."""
    if asked != AUTO:
        for name, dialect in DIALECTS.items():
            if asked == name:
                return Recognised(dialect, "")
        raise InputError(f"--dialect: {asked!r}; expected one of {AUTO}, {', '.join(DIALECTS)}")
    plain = Recognised(OPENAI, "no evidence of another engine", certain=False)
    return _by_models(control) or _by_metrics(control) or _by_pages(control) or plain


def dialect_of_metrics(names: Iterable[str]) -> Dialect | None:
    """Return the engine that gives its metrics such names; null: none known."""
    found = list(names)
    for dialect in DIALECTS.values():
        prefix = dialect.metric_prefix
        if prefix is not None and any(name.startswith(prefix) for name in found):
            return dialect
    return None


def dialect_of_owner(owner: object) -> Dialect | None:
    """Return the engine that names itself so in ``/v1/models``; null: none known."""
    return next((each for each in DIALECTS.values() if each.owner is not None and each.owner == owner), None)


def recognition_notes(found: Recognised) -> list[str]:
    """Return a note on the evidence for a run's summary; its start line has it already."""
    return [f"--dialect auto: {found.dialect.name}, {found.evidence}"] if found.evidence else []


def dialect_notes(dialect: Dialect) -> list[str]:
    """Return a note on the dialect's limits, if it has some."""
    if dialect.exact_lengths:
        return []
    return [f"dialect {dialect.name}: outputs may end early; --dialect names the real engine"]


def _by_models(control: Control) -> Recognised | None:
    listed = _object(control.text("/v1/models")).get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    dialect = dialect_of_owner(first.get("owned_by") if isinstance(first, dict) else None)
    return None if dialect is None else Recognised(dialect, "as /v1/models says")


def _by_metrics(control: Control) -> Recognised | None:
    lines = control.text("/metrics").splitlines()
    dialect = dialect_of_metrics(line.split(maxsplit=1)[0] for line in lines if line[:1] not in {"", "#"})
    return None if dialect is None else Recognised(dialect, f"its metrics are {dialect.metric_prefix}…")


def _by_pages(control: Control) -> Recognised | None:
    for dialect in DIALECTS.values():
        for path, key in dialect.pages.items():
            if key in _object(control.text(path)):
                return Recognised(dialect, f"it has {path} with {key}")
    return None


def _object(text: str) -> dict[str, object]:
    """Return the JSON object in a text; empty for any other text."""
    found = decoded(text)
    return found if isinstance(found, dict) else {}
