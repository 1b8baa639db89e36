"""Registry of engine dialects, and the detection of an engine's dialect.

Evidence, in order: ``owned_by`` in the model list, the prefix of metric names, pages that only one engine serves. A
router may respond with its own model list; ``--dialect`` then names the engine behind the router.
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
    """The detected dialect of an engine, with the evidence."""

    dialect: Dialect
    evidence: str
    """For a note; empty: the user named the dialect."""
    certain: bool = True
    """False: no evidence, so only documented fields of OpenAI's API are used."""


def find_dialect(control: Control, requested: str) -> Recognised:
    """Return the requested dialect, or for ``auto`` the detected dialect. Raises InputError for an unknown name."""
    if requested != AUTO:
        for name, dialect in DIALECTS.items():
            if requested == name:
                return Recognised(dialect, "")
        raise InputError(f"--dialect: {requested!r}; expected one of {AUTO}, {', '.join(DIALECTS)}")
    plain = Recognised(OPENAI, "no evidence of another engine", certain=False)
    return _by_models(control) or _by_metrics(control) or _by_pages(control) or plain


def dialect_of_metrics(names: Iterable[str]) -> Dialect | None:
    """Return the engine by the prefix of its metric names; None: unknown."""
    metric_names = list(names)
    for dialect in DIALECTS.values():
        prefix = dialect.metric_prefix
        if prefix is not None and any(name.startswith(prefix) for name in metric_names):
            return dialect
    return None


def dialect_of_owner(owner: object) -> Dialect | None:
    """Return the engine by ``owned_by`` of ``/v1/models``; None: unknown."""
    return next((dialect for dialect in DIALECTS.values() if owner is not None and dialect.owner == owner), None)


def recognition_notes(recognised: Recognised) -> list[str]:
    """Return a note on the evidence, for the run's summary; the start line shows the evidence already."""
    return [f"--dialect auto: {recognised.dialect.name}, {recognised.evidence}"] if recognised.evidence else []


def dialect_notes(dialect: Dialect) -> list[str]:
    """Return a note if the dialect cannot set the number of output tokens."""
    if dialect.exact_lengths:
        return []
    return [f"dialect {dialect.name}: outputs may end early; --dialect names the real engine"]


def _by_models(control: Control) -> Recognised | None:
    listed = _object(control.text("/v1/models")).get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    dialect = dialect_of_owner(first.get("owned_by") if isinstance(first, dict) else None)
    return None if dialect is None else Recognised(dialect, "by owned_by in /v1/models")


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
    value = decoded(text)
    return value if isinstance(value, dict) else {}
