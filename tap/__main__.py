"""``tap``: a reverse proxy that records traffic's shape, timing and prefix sharing, not its content."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tap.config import TapConfig, at_least, checked_listen, checked_tokenizer, checked_trace, checked_upstream
from tap.service import serve
from tracefile.commandline import run_command
from wire.loop import run

MIB = 1 << 20


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="tap", description=__doc__.partition(": ")[2] if __doc__ else None)
    made.add_argument("--upstream", required=True, metavar="URL", help="the engine, or a gateway before it")
    made.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="where clients connect; port 0: any free one"
    )
    made.add_argument(
        "--trace", required=True, metavar="FILE", help="the trace to write (.jsonl, .jsonl.zst, .jsonl.gz)"
    )
    made.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH|bytes|ids",
        help="whose token ids are hashed: the model's tokenizer directory; bytes: UTF-8 in place of tokens; "
        "ids: only prompts sent as token ids",
    )
    made.add_argument("--block-size", type=int, metavar="TOKENS", help="default 16, or the engine's if smaller")
    made.add_argument(
        "--hash",
        choices=["xxh3_64", "blake2b"],
        default="xxh3_64",
        dest="algorithm",
        help="default %(default)s; blake2b for traces that leave the house",
    )
    made.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="secret key of the hashes; default $KVTAPE_KEY_FILE or ~/.config/kvtape/key",
    )
    made.add_argument("--model", metavar="NAME", help="model name in the trace's header and at the root of every chain")
    made.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME",
        help="a model name that selects an adapter; may be repeated",
    )
    made.add_argument(
        "--max-body-mb",
        type=float,
        default=16.0,
        metavar="MB",
        help="bodies beyond this are relayed, not copied (default %(default)g)",
    )
    made.add_argument(
        "--queue-mb",
        type=float,
        default=256.0,
        metavar="MB",
        help="memory for all copies together; beyond it records are dropped and counted (default %(default)g)",
    )
    made.add_argument(
        "--engine-facts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the upstream's /version, /metrics and /v1/models once at start",
    )
    made.add_argument(
        "--wait-s",
        type=float,
        default=0.0,
        metavar="S",
        help="how long to wait for the upstream at start (default %(default)g)",
    )
    made.add_argument(
        "--drain-s",
        type=float,
        default=30.0,
        metavar="S",
        help="how long requests in flight may go on after SIGTERM or Ctrl-C (default %(default)g)",
    )
    made.add_argument("--overwrite", action="store_true", help="replace a trace that is there already")
    return made


def read_config(argv: Sequence[str]) -> TapConfig:
    """The checked settings; raises InputError."""
    args = parser().parse_args(argv)
    if args.block_size is not None:
        at_least("--block-size", args.block_size, 1)
    at_least("--max-body-mb", args.max_body_mb, 0)
    at_least("--queue-mb", args.queue_mb, 0)
    at_least("--wait-s", args.wait_s, 0)
    at_least("--drain-s", args.drain_s, 0)
    return TapConfig(
        upstream=checked_upstream(args.upstream),
        listen=checked_listen(args.listen),
        trace=checked_trace(args.trace, overwrite=args.overwrite),
        tokenizer=checked_tokenizer(args.tokenizer),
        block_size=args.block_size,
        algorithm=args.algorithm,
        key_file=args.key_file,
        model=args.model,
        loras=tuple(args.lora),
        max_body_bytes=int(args.max_body_mb * MIB),
        queue_bytes=int(args.queue_mb * MIB),
        engine_facts=args.engine_facts,
        wait_s=args.wait_s,
        drain_s=args.drain_s,
        overwrite=args.overwrite,
    )


def main(argv: Sequence[str]) -> int:
    """Serve until told to end."""
    run(serve(read_config(argv)))
    return 0


def command() -> None:
    """Entry point of the ``tap`` command."""
    run_command("tap", main)


if __name__ == "__main__":
    command()
