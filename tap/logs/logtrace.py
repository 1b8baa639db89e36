"""A trace out of a request log: each row hashed and recorded as a tap does."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tap.ipc.exchange import ExchangeCopy, RecorderSetup
from tap.logs.partings import Partings, print_partings
from tap.logs.rows import LogRows
from tap.prompts.prompt import ChainStart, PromptHasher, prompt_hasher
from tap.prompts.shape import RequestShape, read_shape
from tap.recorder.recording import RecordMaker
from tracefile.commandline.progress import counted
from tracefile.files.writing import new_writer
from tracefile.hashing.hashkey import load_key
from tracefile.importers.wallclock import midnight_ns
from tracefile.records.errors import InputError
from tracefile.records.schema import HashInfo, Meta, Record
from tracefile.sessions import SessionIndex


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
            record = sessions.link(made.record)
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
