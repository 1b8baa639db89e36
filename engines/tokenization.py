"""Requests to an engine's ``/tokenize`` and ``/detokenize``, and their responses.

vLLM takes a text (``prompt``) or a chat (``messages``) at ``/tokenize``, and so does SGLang, whose older versions
take a text only. llama.cpp takes a text as ``content`` and renders a chat at ``/apply-template``. ``/detokenize``
returns ``prompt`` (vLLM), ``text`` (SGLang) or ``content`` (llama.cpp).
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from engines.dialect import Control
from tracefile.records.errors import InputError

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
APPLY_TEMPLATE = "/apply-template"


LOADING = f"{TOKENIZE} gave HTTP 503"
"""Problem of an engine that accepts connections while it loads its model, as does llama.cpp."""
PROBE = "time"
"""Text that every vocabulary can tokenize."""


class TokenIds(msgspec.Struct):
    """Response of ``/tokenize``."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


class Rendered(msgspec.Struct):
    """Response of ``/apply-template``."""

    prompt: str


class DetokenizedText(msgspec.Struct):
    """Response of ``/detokenize``; each engine sets one field."""

    prompt: str | None = None
    text: str | None = None
    content: str | None = None

    @property
    def content_text(self) -> str | None:
        return next((text for text in (self.prompt, self.text, self.content) if text is not None), None)


def tokenizer_problem(control: Control, model: str | None, *, as_content: bool) -> str | None:
    """Return the reason why ``/tokenize`` is unusable; None: it returns token ids. Costs one small POST."""
    fields = text_request(PROBE, special=False, as_content=as_content)
    model_field = {} if model is None else {"model": model}
    try:
        response = control.post(TOKENIZE, msgspec.json.encode({**model_field, **fields}))
    except InputError:
        return f"{TOKENIZE} is unreachable"
    if not response.is_success:
        return f"{TOKENIZE} gave {response.status_text}"
    try:
        token_ids = msgspec.json.decode(response.content, type=TokenIds).tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return f"{TOKENIZE} returns no token ids"
    return None if token_ids else f"{TOKENIZE} returns no tokens for a text"


def text_request(text: str, *, special: bool, as_content: bool) -> dict[str, Any]:
    """Return the ``/tokenize`` request of a text; ``special``: add special tokens; ``as_content``: llama.cpp's form."""
    if as_content:
        return {"content": text, "add_special": special, "parse_special": True}
    return {"prompt": text, "add_special_tokens": special}


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``/tokenize`` request of a chat: the fields that render its prompt, template arguments included."""
    template_arguments = body.get("chat_template_kwargs")
    arguments: dict[str, Any] = dict(template_arguments) if isinstance(template_arguments, dict) else {}
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none", **arguments}
    if body.get("documents"):
        arguments["documents"] = body["documents"]
    continued = body.get("continue_final_message") is True
    fields = {
        "model": body.get("model"),
        "messages": body["messages"],
        "tools": body.get("tools"),
        "add_generation_prompt": body.get("add_generation_prompt", not continued),
        "continue_final_message": continued or None,
        "add_special_tokens": body.get("add_special_tokens"),
        "chat_template_kwargs": arguments or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
