"""Images, audio and files in a chat: how far its prompt is known in spite of them.

How many tokens a picture becomes is the engine's business and in no request, so the chain of a prompt with one stops
where the message begins that holds the first: engines move a message's media before its text, so what stands in that
message is not known to come before it. Media are not looked at, neither the bytes of a ``data:`` URL nor an address:
two prompts that are equal up to their first picture share that far by their hashes, and no further.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from tap.chatmessages import TEXT_PARTS, UntokenizableError
from tap.tokenizer import Tokenizer

SENTINELS = ("a", "0")
"""Two texts that no tokenizer joins to one another's neighbours in the same way: a letter and a digit."""


def first_media_message(body: Mapping[str, Any]) -> int | None:
    """Which message holds the first part that is not text; null: all is text."""
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and _has_media(message):
            return index
    return None


def ids_before_media(tokenizer: Tokenizer, body: Mapping[str, Any], first: int) -> list[int]:
    """The prompt's ids up to the content of message ``first``: what is the same whatever stands there.

    The template is applied twice, each time with another text in that content's place, and what both have in common
    is kept, less one token that the neighbour could have changed. Raises UntokenizableError.
    """
    one, other = (tokenizer.encode_chat(_with_text(body, first, sentinel)) for sentinel in SENTINELS)
    common = [ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
    if len(common) == min(len(one), len(other)):
        raise UntokenizableError("multimodal")  # a template that leaves the content out tells nothing of its place
    return common[:-1]


def messages_before(body: Mapping[str, Any], first: int) -> dict[str, Any]:
    """The chat without message ``first`` and what follows it."""
    return {**body, "messages": body["messages"][:first]}


def _with_text(body: Mapping[str, Any], first: int, text: str) -> dict[str, Any]:
    """The chat with a text for the content of message ``first``, and without the media of later ones."""
    messages = body["messages"]
    replaced = {**messages[first], "content": text}
    later = [_without_media(message) for message in messages[first + 1 :]]
    return {**body, "messages": [*messages[:first], replaced, *later]}


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(_is_media(part) for part in content)


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS


def _without_media(message: Any) -> Any:
    if not isinstance(message, dict) or not _has_media(message):
        return message
    return {**message, "content": [part for part in message["content"] if not _is_media(part)]}
