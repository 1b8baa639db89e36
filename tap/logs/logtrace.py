"""A trace out of a request log: each row hashed and recorded as a tap does, and the places where prompts part."""

import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from tap.ipc.exchange import ExchangeCopy, RecorderSetup
from tap.logs.rows import LogRows
from tap.prompts.prompt import ChainStart, PromptHasher, prompt_hasher
from tap.prompts.shape import RequestShape, read_shape
from tap.recorder.recording import RecordMaker
from tracefile.commandline.console import CommandConsole
from tracefile.commandline.progress import counted
from tracefile.files.writing import new_writer
from tracefile.hashing.hashkey import load_key
from tracefile.importers.wallclock import midnight_ns
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record
from tracefile.sessions import SessionIndex

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


def read_log(args: Namespace) -> int:
    """Write the trace of a log, and print the places where its prompts part."""
    if args.block_size < 1:
        raise InputError(f"--block-size {args.block_size}; expected 1 or more")
    if args.tokenizer == "engine":
        raise InputError("--tokenizer engine: a log has no engine to ask; expected the model's tokenizer, bytes or ids")
    key = load_key(args.key_file)
    rows = LogRows(args.log, args.endpoint)
    exchanges = iter(rows)
    first = next(exchanges, None)
    if first is None:
        raise InputError(f"{args.log}: no request in it; expected rows with a prompt, messages or input")
    epoch_ns = midnight_ns(first.arrival_ns) if rows.has_times else 0
    setup = RecorderSetup(
        trace=args.output,
        overwrite=args.overwrite,
        meta=_meta(args, key.key_id, epoch_ns if rows.has_times else None),
        tokenizer=args.tokenizer,
        key_secret=key.secret,
        algorithm=args.algorithm,
        block_size=args.block_size,
        branches=args.tokenizer != "bytes",
        hash_model=args.model,
        loras=[],
        epoch_ns=epoch_ns,
    )
    hasher = prompt_hasher(setup, key)
    maker = RecordMaker(key, hasher, epoch_ns=epoch_ns, hash_model=args.model, loras=frozenset())
    sessions = SessionIndex(args.block_size)
    partings = Partings(args.block_size)
    unhashed: Counter[str] = Counter()
    with new_writer(args.output, setup.meta, inputs=[args.log], overwrite=args.overwrite) as writer:
        for exchange in counted(chain([first], exchanges), "requests read"):
            made = maker.make(exchange)
            if made.unhashed is not None:
                unhashed[made.unhashed] += 1
            record = sessions.link(made.record, made.chat_ids)
            _add_parting(partings, hasher, exchange, record, args.model)
            writer.write(record)
    _say(args, rows, writer.count, unhashed)
    print_partings(partings, as_json=args.json)
    return 0


def _meta(args: Namespace, key_id: str, epoch_ns: int | None) -> Meta:
    return Meta(
        source="tap",
        model=args.model,
        tokenizer=args.tokenizer if args.tokenizer in ("bytes", "ids") else Path(args.tokenizer).name,
        block_size=args.block_size,
        hash=HashInfo(algorithm=args.algorithm, key_id=key_id, branches=True if args.tokenizer != "bytes" else None),
        epoch_unix_ns=epoch_ns,
        extra={"read_from": "log"},
    )


def _add_parting(
    partings: Partings, hasher: PromptHasher, exchange: ExchangeCopy, record: Record, model: str | None
) -> None:
    """Count the place at which a chat parts from earlier ones; other APIs' prompts have no messages to name."""
    if exchange.endpoint not in ("/v1/chat/completions", "/v1/messages") or not exchange.request_body:
        partings.add(record, [], lambda _: 0)
        return
    shape = read_shape(exchange.endpoint, exchange.request_body[0])
    messages = shape.body.get("messages")
    start = ChainStart(model or shape.model or "", record.lora, shape.cache_salt)
    known = messages if isinstance(messages, list) else []
    partings.add(record, known, lambda count: _prompt_tokens(hasher, shape, start, known[:count]))


def _prompt_tokens(hasher: PromptHasher, shape: RequestShape, start: ChainStart, messages: Sequence[Any]) -> int:
    """Tokens of a prompt with these messages only; 0 for none."""
    if not messages:
        return 0
    # The template's opening of an answer is not in a prompt that goes on with another message.
    body = {**shape.body, "messages": list(messages), "add_generation_prompt": False}
    shorter = msgspec.structs.replace(shape, body=body)
    prompt = hasher.hash_prompt(shorter, start, None, None)
    return prompt.token_count or prompt.token_estimate or 0


def _say(args: Namespace, rows: LogRows, written: int, unhashed: Counter[str]) -> None:
    lines = [f"{written:,} requests"]
    lines += [f"{count:,} rows left out: {reason}" for reason, count in rows.left_out.items()]
    lines += [f"{count:,} requests without hashes: {reason}" for reason, count in unhashed.items()]
    if not rows.has_times:
        lines.append("no times in the log: requests stand a second apart, in its order; read prefixes only")
    for line in lines:
        print(f"{args.output}: {line}", file=sys.stderr)


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
