"""Reasons for an engine that refuses every request; never quotes the engine."""

from collections import Counter

import msgspec

from engines.access import REFUSED
from engines.control import ControlClient
from engines.dialect import Response
from loadgen.core.settings import RunSettings


def refusal(control: ControlClient, model: str, settings: RunSettings, errors: Counter[str], lengths: str) -> str:
    """Likely reason for an engine that refuses every request, with these errors; ``lengths``: flags that say them."""
    if errors["http_413"]:
        return (
            f"{lengths}: the requests are too large for the server (HTTP 413); expected shorter ones, or a "
            "higher limit of a gateway (nginx: client_max_body_size)"
        )
    vocabulary = settings.vocabulary
    plain = _short(control, model, [vocabulary.low, vocabulary.high - 1])
    if refused := [status for status in REFUSED if errors[f"http_{status}"]]:
        return f"--url: {control.url}: {plain.refusal or control.access.refusal(refused[0])}"
    if plain.is_success and settings.fields.customised:
        return (
            "--extra-body, --no-stream: the engine refuses these requests but takes a plain one; expected fields and "
            "values that it takes, and lengths within its context"
        )
    if plain.is_success:
        return (
            f"{lengths}: the engine refuses these requests but takes a short one of the same vocabulary; "
            f"expected lengths within its context{_context(control)}"
        )
    return _refused_ids(control, model, settings, plain)


def _refused_ids(control: ControlClient, model: str, settings: RunSettings, plain: Response) -> str:
    """Reason for an engine that refuses a short prompt of token ids."""
    low, high = settings.vocabulary.low, settings.vocabulary.high
    if _short(control, model, [1]).is_success:
        return (
            f"--vocab-high: the engine refuses token ids of {low} … {high - 1} "
            f"(HTTP {plain.status}); expected ids of its own vocabulary"
        )
    if plain.refusal:
        return f"--url: {control.url}: {plain.refusal}"
    if _short(control, model, "a").is_success:
        return (
            f"--api completions: the engine takes text, no token ids (HTTP {plain.status}); expected --api chat, "
            "with --tokenizer PATH for exact lengths"
        )
    return f"--url, --model: the engine refuses /v1/completions (HTTP {plain.status}); expected an engine serving it"


def _short(control: ControlClient, model: str, prompt: list[int] | str) -> Response:
    return control.post("/v1/completions", msgspec.json.encode({"model": model, "prompt": prompt, "max_tokens": 1}))


def _context(control: ControlClient) -> str:
    most = control.facts().engine.max_model_len
    return "" if most is None else f" of {most:,} tokens, prompt and output together (max_model_len)"
