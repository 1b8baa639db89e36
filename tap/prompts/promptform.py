"""What a request's prompt is before it has token ids: a text, ids, or a chat, whatever API it came by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tap.prompts.chatmessages import UntokenizableError
from tap.prompts.messagesinput import has_inline_system, messages_chat
from tap.prompts.responsesinput import responses_chat
from tap.prompts.shape import RequestShape, token_ids


class TextPrompt(NamedTuple):
    """A text as it stands."""

    text: str
    add_special_tokens: bool


class IdsPrompt(NamedTuple):
    """Token ids as the client sent them."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for a template: the fields of a chat completion request."""

    body: Mapping[str, Any]
    otherwise: Mapping[str, Any] | None = None
    """The same, for a template that refuses ``body``. Null: there is no other way to put it."""


PromptForm = TextPrompt | IdsPrompt | ChatPrompt


def prompt_form(shape: RequestShape) -> PromptForm:
    """The one prompt of a request; raises UntokenizableError where there is none, or more than one."""
    body = shape.body
    if body.get("truncate_prompt_tokens") is not None:
        raise UntokenizableError("truncated_by_request")
    match shape.endpoint:
        case "/v1/chat/completions":
            return ChatPrompt(body)
        case "/v1/completions":
            if body.get("prompt_embeds") is not None:
                raise UntokenizableError("prompt_embeds")
            return _single(body, body.get("prompt"))
        case "/v1/responses":
            return ChatPrompt(responses_chat(body))
        case "/v1/messages":
            otherwise = messages_chat(body, system_first=True) if has_inline_system(body) else None
            return ChatPrompt(messages_chat(body), otherwise)
        case "/v1/embeddings" if body.get("messages") is not None:
            # An embedding's chat ends with what was said: nobody is to answer.
            return ChatPrompt({"add_generation_prompt": False, **body})
        case "/v1/embeddings":
            return _single(body, body.get("input"))
    raise UntokenizableError("other_endpoint")


def _single(body: Mapping[str, Any], prompt: object) -> TextPrompt | IdsPrompt:
    """A prompt that is text, ids, or a list of just one of them; a batch has a chain for each, and a record one."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise UntokenizableError("batch")
        prompt = prompt[0]
    ids = token_ids(prompt)
    if ids is not None:
        return IdsPrompt(ids)
    if not isinstance(prompt, str):
        raise UntokenizableError("malformed_prompt")
    return TextPrompt(prompt, body.get("add_special_tokens", True) is not False)
