"""Images, audio and files in a chat: their ids in the prompt's chain, and the end of the chain where ids are unknown.

The usage tells the length of the whole prompt, and the rest is text: one message of unknown length has the difference,
which is kept for the next turn. In the ids, a message with media is a run of that length, made of a digest of all its
content: two prompts share blocks there if they share the whole message. The ids end before a message of unknown length.
Media are not decoded: a ``data:`` URL is its text, and an address stands for its target.

The template tells the place of a message's content: it is applied twice, each time with another letter for that
content, and where the ids differ is its place. The token on either side belongs to the run, since the content could
have changed it. If that does not come out, the ids end before the first message with media.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import msgspec

from tap.prompts.chatmessages import TEXT_PARTS, UntokenizableError
from tap.prompts.tokenizer import Tokenizer

SENTINELS = ("a", "0")
"""Two texts that no tokenizer joins to their neighbours in the same way: a letter and a digit."""
MARGIN = 1
REMEMBERED_SIZES = 10_000
MAX_RUN = 1 << 20
"""A longer message cannot be: the usage is not of this prompt."""
MAX_IDS = 1 << 21
"""Bound for a prompt's ids: one image of known length may stand in it a thousand times."""


class MediaIds(NamedTuple):
    """Ids of a prompt with media."""

    ids: Sequence[int]
    whole: bool
    """False: the ids end before the first message of unknown length."""
    solved: bool
    """The count was taken from usage, so it does not check the tokenizer."""


class Run(NamedTuple):
    """Ids in place of a message's content."""

    start: int
    """First place of the run among the ids of the chat with letters for its media."""
    end: int
    digest: bytes
    """Digest of the model, the content and the tokens beside it."""


class MediaSizes:
    """Token counts of messages with media, by digest; the oldest are forgotten."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def get(self, digest: bytes) -> int | None:
        return self._sizes.get(digest)

    def learn(self, runs: Sequence[Run], text_tokens: int, prompt_tokens: int) -> bool:
        """Solve for the one run of unknown length; return whether that was possible.

        Known lengths must fit the same sum, and are forgotten if they do not.
        """
        known = sum(self._sizes.get(run.digest, 0) for run in runs)
        unknown = [run.digest for run in runs if run.digest not in self._sizes]
        left = prompt_tokens - text_tokens - known
        if not unknown and left != 0:
            for run in runs:
                self._sizes.pop(run.digest, None)
        if not unknown or len(set(unknown)) > 1 or left % len(unknown) or not 0 < left // len(unknown) <= MAX_RUN:
            return False
        self._sizes[unknown[0]] = left // len(unknown)
        if len(self._sizes) > REMEMBERED_SIZES:
            self._sizes.popitem(last=False)
        return True


def media_messages(body: Mapping[str, Any]) -> list[int]:
    messages = body.get("messages")
    return [
        index for index, message in enumerate(messages if isinstance(messages, list) else ()) if _has_media(message)
    ]


def ids_with_media(
    tokenizer: Tokenizer, sizes: MediaSizes, body: Mapping[str, Any], holders: Sequence[int], usage_tokens: int | None
) -> MediaIds:
    """Return the ids of a chat whose messages ``holders`` hold media; raises UntokenizableError."""
    one, other = (tokenizer.encode_chat(_with_text(body, holders, sentinel)) for sentinel in SENTINELS)
    runs = _runs(body, holders, one, other)
    if runs is None:
        return MediaIds(_common_beginning(one, other), whole=False, solved=False)
    text_tokens = len(one) - sum(run.end - run.start for run in runs)
    solved = usage_tokens is not None and sizes.learn(runs, text_tokens, usage_tokens)
    ids: list[int] = []
    at = 0
    for run in runs:
        ids += one[at : run.start]
        size = sizes.get(run.digest)
        if size is None or len(ids) + size > MAX_IDS:
            return MediaIds(ids, whole=False, solved=False)
        ids += array("I", hashlib.shake_128(run.digest).digest(4 * size))  # different for each content
        at = run.end
    return MediaIds([*ids, *one[at:]], whole=True, solved=solved)


def messages_before(body: Mapping[str, Any], first: int) -> dict[str, Any]:
    return {**body, "messages": body["messages"][:first]}


def _runs(
    body: Mapping[str, Any], holders: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> list[Run] | None:
    """Return the run of each message's content; null: the places do not fit."""
    places = [at for at, (ours, theirs) in enumerate(zip(one, other, strict=False)) if ours != theirs]
    if len(one) != len(other) or len(places) != len(holders):
        return None
    if any(later - earlier <= 2 * MARGIN for earlier, later in pairwise(places)):
        return None
    return [_run(body, holder, one, place) for holder, place in zip(holders, places, strict=True)]


def _run(body: Mapping[str, Any], holder: int, ids: Sequence[int], place: int) -> Run:
    start, end = max(0, place - MARGIN), min(len(ids), place + 1 + MARGIN)
    content = body["messages"][holder]["content"]
    said = msgspec.json.encode([body.get("model"), content, *ids[start:place], *ids[place + 1 : end]])
    return Run(start, end, hashlib.blake2b(said, digest_size=16).digest())


def _common_beginning(one: Sequence[int], other: Sequence[int]) -> list[int]:
    common = [ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
    if len(common) == min(len(one), len(other)):
        raise UntokenizableError("multimodal")  # a template that leaves the content out tells nothing of its place
    return common[:-MARGIN]


def _with_text(body: Mapping[str, Any], holders: Sequence[int], text: str) -> dict[str, Any]:
    messages = list(body["messages"])
    for holder in holders:
        messages[holder] = {**messages[holder], "content": text}
    return {**body, "messages": messages}


def _has_media(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS for part in parts)
