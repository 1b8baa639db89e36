"""Reasons why an engine refuses every request, such as token ids or lengths; never quotes the engine."""

from collections import Counter

import msgspec

from engines.access import REFUSED
from engines.control import ControlClient
from engines.dialect import Response
from loadgen.core.settings import RunSettings


def refusal(control: ControlClient, model: str, settings: RunSettings, errors: Counter[str], lengths: str) -> str:
    """Likely reason for an engine that refuses every request; ``lengths``: flags of the token counts."""
    if errors["http_413"]:
        return (
            f"{lengths}: requests are too large for the server (HTTP 413); expected shorter requests, or a "
            "higher limit in the gateway (nginx: client_max_body_size)"
        )
    vocabulary = settings.vocabulary
    plain = _short(control, model, [vocabulary.low, vocabulary.high - 1])
    if refused := [status for status in REFUSED if errors[f"http_{status}"]]:
        return f"--url: {control.url}: {plain.refusal or control.access.refusal(refused[0])}"
    if plain.is_success and settings.fields.customised:
        return (
            "--extra-body, --no-stream: the engine refuses these requests but accepts a plain request; expected "
            "fields and values that it accepts, and lengths within its context"
        )
    if plain.is_success:
        return (
            f"{lengths}: the engine refuses these requests but accepts a short one with such ids; "
            f"expected lengths within its context{_context(control)}"
        )
    return _refused_ids(control, model, settings, plain)


def _refused_ids(control: ControlClient, model: str, settings: RunSettings, plain: Response) -> str:
    """Reason for an engine that refuses a short prompt of token ids."""
    low, high = settings.vocabulary.low, settings.vocabulary.high
    if _short(control, model, [1]).is_success:
        return (
            f"--vocab-high: the engine refuses token ids of {low} … {high - 1} "
            f"(HTTP {plain.status}); expected ids of its vocabulary"
        )
    if plain.refusal:
        return f"--url: {control.url}: {plain.refusal}"
    if _short(control, model, "a").is_success:
        return (
            f"--api completions: the engine accepts text but no token ids (HTTP {plain.status}); expected --api chat, "
            "with --tokenizer PATH for exact lengths"
        )
    return f"--url, --model: the engine refuses /v1/completions (HTTP {plain.status}); expected an engine serving it"


def _short(control: ControlClient, model: str, prompt: list[int] | str) -> Response:
    return control.post("/v1/completions", msgspec.json.encode({"model": model, "prompt": prompt, "max_tokens": 1}))


def _context(control: ControlClient) -> str:
    most = control.facts().engine.max_model_len
    return "" if most is None else f" of {most:,} tokens, prompt and output together (max_model_len)"
