"""``tap read-log``: converts a request log to a trace, with token counts and block hashes as from a tap."""

import sys
from argparse import Namespace
from collections import Counter
from itertools import chain
from pathlib import Path

from tap.logs.rows import LogRows
from tap.prompts.prompt import prompt_hasher
from tap.recorder.recording import RecordBuilder
from tracefile.commandline.progress import counted
from tracefile.files.writing import new_writer
from tracefile.hashing.hashkey import load_key
from tracefile.records.errors import InputError
from tracefile.records.schema import HashInfo, Meta
from tracefile.sessions import SessionIndex

DAY_NS = 86_400 * 10**9
"""The trace's t = 0 is midnight UTC, so that all files of a day share it: rows may be ordered by request end."""


def read_log(args: Namespace) -> int:
    if args.block_size < 1:
        raise InputError(f"--block-size {args.block_size}; expected 1 or more")
    if args.tokenizer == "engine":
        raise InputError("--tokenizer engine: a log has no engine; expected the model's tokenizer or ids")
    key = load_key(args.key_file)
    rows = LogRows(args.log, args.endpoint)
    exchanges = iter(rows)
    first = next(exchanges, None)
    if first is None:
        raise InputError(f"{args.log}: no requests; expected rows with a prompt, messages or input")
    epoch_ns = first.arrival_ns - first.arrival_ns % DAY_NS if rows.has_times else 0
    meta = Meta(
        source="tap",
        model=args.model,
        tokenizer=Path(args.tokenizer).name,
        block_size=args.block_size,
        hash=HashInfo(algorithm=args.algorithm, key_id=key.key_id, branches=True),
        epoch_unix_ns=epoch_ns if rows.has_times else None,
        extra={"read_from": "log"},
    )
    hasher = prompt_hasher(key, args.tokenizer, args.algorithm, args.block_size, branches=True)
    builder = RecordBuilder(key, hasher, epoch_ns=epoch_ns, hash_model=args.model)
    sessions = SessionIndex(args.block_size)
    unhashed: Counter[str] = Counter()
    with new_writer(args.output, meta, inputs=[args.log], overwrite=args.overwrite) as writer:
        for exchange in counted(chain([first], exchanges), "requests read"):
            result = builder.build(exchange)
            if result.unhashed is not None:
                unhashed[result.unhashed] += 1
            writer.write(sessions.link(result.record, result.chat_ids))
    lines = [f"{writer.count:,} requests"]
    lines += [f"{count:,} rows skipped: {reason}" for reason, count in rows.skipped.items()]
    lines += [f"{count:,} requests without block hashes: {reason}" for reason, count in unhashed.items()]
    if not rows.has_times:
        lines.append("no times in the log: requests are spaced 1 s apart; only prefix sharing is meaningful")
    for line in lines:
        print(f"{args.output}: {line}", file=sys.stderr)
    return 0
