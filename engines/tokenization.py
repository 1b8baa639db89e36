"""Questions to an engine's own tokenizer, and its responses.

vLLM takes a text (``prompt``) or a chat (``messages``) at ``/tokenize``, and so does SGLang, whose older versions
take a text only. llama.cpp takes a text as ``content`` and renders a chat at ``/apply-template``. ``/detokenize``
returns ``prompt`` (vLLM), ``text`` (SGLang) or ``content`` (llama.cpp).
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
APPLY_TEMPLATE = "/apply-template"


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
