"""Places where prompts part from earlier ones, and the prefix hits that are lost there."""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.table import Table

from tracefile.commandline.console import CommandConsole
from tracefile.records.schema import BlockHash, Record

PLACES_SHOWN = 20
Messages = Sequence[Any]
CountTokens = Callable[[int], int]
"""Tokens of a prompt with its first messages only, by their number."""


@dataclass(frozen=True, slots=True)
class Place:
    """Point at which requests part."""

    message: int
    """From 1; 0: before the messages, in tool definitions or the template."""
    role: str
    token: int
    """Tokens of the prompt before it."""
    is_last: bool
    """True: in the last message, where new content is."""


@dataclass(slots=True)
class Partings:
    """Requests that parted from earlier ones, by place.

    A request parts from all earlier ones after the longest prefix that one of them has. In its last message that is
    how traffic is; in an earlier one, such as a date in a system prompt, all behind it is lost to the prefix cache.
    """

    block_size: int
    requests: dict[Place, int] = field(default_factory=lambda: defaultdict(int))
    lost_tokens: dict[Place, int] = field(default_factory=lambda: defaultdict(int))
    """Tokens between the place and the request's last message, which an equal beginning would have let hit."""
    alone: int = 0
    """Requests that share no token with an earlier one."""
    _seen: set[BlockHash] = field(default_factory=set)

    def add(self, record: Record, messages: Messages, count_tokens: CountTokens) -> None:
        """Take a request in the trace's order; ``count_tokens`` is asked a few times if it parts before its end."""
        if record.block_hashes is None or record.prompt_tokens is None:
            return
        shared = self._shared_tokens(record)
        self._seen.update(record.block_hashes)
        self._seen.update(record.output_block_hashes or ())
        if shared == 0:
            self.alone += 1
        elif shared < record.prompt_tokens and messages:
            self._count(shared, messages, count_tokens)

    def _shared_tokens(self, record: Record) -> int:
        if record.branch_tokens is not None:
            return record.branch_tokens
        blocks = 0
        for block in record.block_hashes or ():
            if block not in self._seen:
                break
            blocks += 1
        return blocks * self.block_size

    def _count(self, shared: int, messages: Messages, count_tokens: CountTokens) -> None:
        low, high = 0, len(messages)
        while low < high:
            middle = (low + high) // 2
            if count_tokens(middle) > shared:
                high = middle
            else:
                low = middle + 1
        # ``low`` messages are the fewest that hold more than the shared tokens.
        number = min(low, len(messages))
        role = "tools" if number == 0 else _role(messages[number - 1])
        place = Place(number, role, shared, number == len(messages))
        self.requests[place] += 1
        if not place.is_last:
            self.lost_tokens[place] += max(0, count_tokens(len(messages) - 1) - shared)

    def worst(self, most: int) -> list[Place]:
        """Places before the last message, those with the most lost tokens first."""
        early = [place for place in self.requests if not place.is_last]
        return sorted(early, key=lambda place: (-self.lost_tokens[place], place.message, place.token))[:most]


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return role if role in ("system", "developer", "user", "assistant", "tool") else "other"


def print_partings(partings: Partings, *, as_json: bool) -> None:
    """Print the places where prompts part before their last message, the costliest first."""
    places = partings.worst(PLACES_SHOWN)
    if as_json:
        rows = [
            {
                "message": place.message,
                "role": place.role,
                "token": place.token,
                "block": place.token // partings.block_size,
                "requests": partings.requests[place],
                "lost_tokens": partings.lost_tokens[place],
            }
            for place in places
        ]
        print(msgspec.json.encode({"partings": rows, "sharing_nothing": partings.alone}).decode())
        return
    console = CommandConsole(sys.stdout)
    if not places:
        console.print("Prompts part in their last message only: no earlier message keeps them from sharing more.")
        return
    table = Table(title="where prompts part before their last message")
    for name in ("message", "role", "token", "block", "requests", "tokens lost behind it"):
        table.add_column(name, justify="left" if name == "role" else "right")
    for place in places:
        numbers = (place.token // partings.block_size, partings.requests[place], partings.lost_tokens[place])
        table.add_row(str(place.message), place.role, f"{place.token:,}", *(f"{number:,}" for number in numbers))
    console.print(table)
