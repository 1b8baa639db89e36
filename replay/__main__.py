"""``replay``: a captured trace as load on any engine, with the capture's lengths, times and sharing, and new tokens."""

import argparse
import secrets
from collections.abc import Sequence
from pathlib import Path

from loadgen.__main__ import add_target_arguments
from loadgen.draws import Vocabulary
from replay.config import ReplayConfig
from replay.running import run_replay
from tracefile.commandline import run_command

EPILOG = """\
Requests that the engine refused in the capture are left out; those that were cut short are sent with as many output
tokens as had come. Equal --nonce: equal tokens. Exit status: 0 done; 1 no request ended well; 2 bad input; 130 cut
short by Ctrl-C or SIGTERM (what is in flight is recorded as client_abort, the trace is complete).
"""


def main(argv: Sequence[str]) -> int:
    """Parse ``argv`` and run the replay."""
    return run_replay(parse_config(argv))


def parse_config(argv: Sequence[str]) -> ReplayConfig:
    """The config of a command line; raises InputError naming the flag."""
    args = _parser().parse_args(argv)
    return ReplayConfig(
        source=args.source,
        url=args.url,
        trace=args.trace,
        nonce=secrets.token_hex(8) if args.nonce is None else args.nonce,
        model=args.model,
        replay_sessions=args.replay_sessions,
        cold_prompts=args.cold_prompts,
        speedup=args.speedup,
        max_think_s=args.max_think_s,
        limit=args.limit,
        reset_cache=args.reset_cache,
        vocabulary=Vocabulary(args.vocab_low, args.vocab_high),
        timeout_s=args.timeout_s,
        overwrite=args.overwrite,
        summary=args.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="TRACE", help="the trace to send again")
    add_target_arguments(parser)
    parser.add_argument(
        "--replay-sessions", action="store_true", help="a turn waits for the one before; without: recorded times"
    )
    parser.add_argument("--cold-prompts", action="store_true", help="tokens of its own for every request: no hits")
    parser.add_argument("--speedup", type=float, default=1.0, metavar="X", help="divide arrivals and pauses by X")
    parser.add_argument("--max-think-s", type=float, metavar="S", help="cut longer pauses to S")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N requests by arrival alone")
    parser.add_argument("--nonce", metavar="WORD", help="the tokens of an earlier run (default: new ones)")
    parser.add_argument(
        "--reset-cache", action="store_true", help="empty the engine's prefix cache first, and check that it is"
    )
    return parser


def command() -> None:
    """Entry point of the ``replay`` console script."""
    run_command("replay", main)


if __name__ == "__main__":
    command()
