"""ShareGPT: conversations of people with ChatGPT, in the two forms that are passed around.

- one JSON array of ``{"id", "conversations": [{"from": "human" | "gpt" | …, "value"}]}``, as in
  ShareGPT_V3_unfiltered_cleaned_split.json, which vLLM's and AIPerf's benchmarks read (aiperf's
  dataset/loader/sharegpt.py);
- JSON Lines of ``{"conversation_id", "conversation": [{"human", "assistant"}]}``, the swift/sharegpt of evalscope's
  ``share_gpt_*`` (evalscope/perf/plugin/datasets/share_gpt.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from loadgen.datasets.openaimessages import session_of
from loadgen.datasets.rows import decode, rows
from loadgen.datasets.session import DatasetOptions, DatasetSession
from tracefile import InputError

ROLES = {
    "human": "user",
    "user": "user",
    "system": "system",
    "tool": "tool",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}
EXPECTED = "a ShareGPT conversation: conversations of from and value, or conversation of human and assistant"


class Said(msgspec.Struct):
    """Message of the array form."""

    from_: str = msgspec.field(name="from")
    value: str


class Exchange(msgspec.Struct):
    """Question and output of the JSON Lines form."""

    human: str = ""
    assistant: str = ""


class ShareGptRow(msgspec.Struct):
    """Conversation in either form."""

    conversations: list[Said] | None = None
    conversation: list[Exchange] | None = None


def read_sharegpt(path: Path, options: DatasetOptions) -> Iterator[DatasetSession]:
    for where, row in rows(path):
        found = decode(row, ShareGptRow, where, EXPECTED)
        if found.conversations is None and found.conversation is None:
            raise InputError(f"{where}: conversations: missing; expected {EXPECTED}")
        messages = [*_said(found.conversations or [], where), *_exchanged(found.conversation or [])]
        yield session_of(messages, options)


def _said(conversation: list[Said], where: str) -> Iterator[dict[str, Any]]:
    for number, said in enumerate(conversation, start=1):
        role = ROLES.get(said.from_)
        if role is None:
            raise InputError(
                f"{where}: conversations: message {number}: from: {said.from_!r}; expected one of {', '.join(ROLES)}"
            )
        yield {"role": role, "content": said.value}


def _exchanged(conversation: list[Exchange]) -> Iterator[dict[str, Any]]:
    for exchange in conversation:
        if exchange.human.strip():
            yield {"role": "user", "content": exchange.human}
            yield {"role": "assistant", "content": exchange.assistant}
