"""Questions to an engine's own tokenizer, and its responses.

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
"""Problem of an engine that accepts connections while it loads its model, as llama.cpp does."""
PROBE = "time"
"""Text with tokens in every vocabulary."""


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
    def known(self) -> str | None:
        return next((text for text in (self.prompt, self.text, self.content) if text is not None), None)


def tokenizer_problem(control: Control, model: str | None, *, as_content: bool) -> str | None:
    """Return the reason why ``/tokenize`` is of no use; null: it tells the ids of a text. One small POST."""
    question = text_question(PROBE, special=False, as_content=as_content)
    named = {} if model is None else {"model": model}
    try:
        response = control.post(TOKENIZE, msgspec.json.encode({**named, **question}))
    except InputError:
        return f"{TOKENIZE} cannot be asked"
    if not response.is_success:
        return f"{TOKENIZE} gave {response.status_text}"
    try:
        found = msgspec.json.decode(response.content, type=TokenIds).tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return f"{TOKENIZE} answers with no token ids"
    return None if found else f"{TOKENIZE} finds no tokens in a text"


def text_question(text: str, *, special: bool, as_content: bool) -> dict[str, Any]:
    """Return the question for a text's ids; ``special``: with special tokens; ``as_content``: llama.cpp's."""
    if as_content:
        return {"content": text, "add_special": special, "parse_special": True}
    return {"prompt": text, "add_special_tokens": special}


def chat_question(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the question for a chat request's ids: the fields that make its prompt, template arguments included."""
    own = body.get("chat_template_kwargs")
    arguments: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none", **arguments}
    if body.get("documents"):
        arguments["documents"] = body["documents"]
    continued = body.get("continue_final_message") is True
    question = {
        "model": body.get("model"),
        "messages": body["messages"],
        "tools": body.get("tools"),
        "add_generation_prompt": body.get("add_generation_prompt", not continued),
        "continue_final_message": continued or None,
        "add_special_tokens": body.get("add_special_tokens"),
        "chat_template_kwargs": arguments or None,
    }
    return {name: value for name, value in question.items() if value is not None}
