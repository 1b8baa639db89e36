"""``replay``: a captured trace as load on any engine, with the capture's lengths, times and sharing, and new tokens."""

import argparse
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from loadgen.core.draws import Vocabulary
from loadgen.core.request import SESSION_HEADER
from loadgen.core.runflags import add_target_arguments, run_flags
from replay.config import ReplayApi, ReplayConfig, parse_loras
from replay.running import run_replay
from tracefile import open_trace
from tracefile.commandline.durations import duration
from tracefile.commandline.ending import run_command
from tracefile.commandline.parser import Parser

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
        trace=args.output,
        nonce=nonce_of(args),
        run=run_flags(args),
        model=args.model,
        api=args.api,
        tokenizer=args.tokenizer,
        dialect=args.dialect,
        replay_sessions=args.replay_sessions,
        closed_loop=args.closed_loop,
        parallel=args.parallel,
        cold_prompts=args.cold_prompts,
        output_substitution=not args.no_output_substitution,
        speedup=args.speedup,
        max_think_s=args.max_think,
        start_s=args.start,
        end_s=args.end,
        limit=args.limit,
        repeat=args.repeat,
        reset_cache=args.reset_cache,
        session_headers=tuple(args.session_header or (SESSION_HEADER,)),
        loras=parse_loras(args.lora_map),
        vocabulary=Vocabulary(args.vocab_low, args.vocab_high),
        timeout_s=args.timeout,
        overwrite=args.overwrite,
        as_json=args.json,
    )


def nonce_of(args: argparse.Namespace) -> str:
    """Return the given nonce; else the resumed run's, or a new one."""
    if args.nonce is not None:
        return str(args.nonce)
    if args.resume and args.output.exists():
        with open_trace(args.output) as reader:
            workload = reader.meta.workload
            if workload is not None and workload.nonce is not None:
                return workload.nonce
    return secrets.token_hex(8)


def _parser() -> Parser:
    parser = Parser(prog="replay", description=__doc__, epilog=EPILOG)
    parser.add_argument("source", type=Path, metavar="TRACE", help="the trace to send again")
    add_target_arguments(parser)
    _add_timing(parser)
    _add_selection(parser)
    _add_content(parser)
    _add_target(parser)
    return parser


def _add_timing(parser: argparse.ArgumentParser) -> None:
    when = parser.add_argument_group("when")
    when.add_argument(
        "--replay-sessions", action="store_true", help="a turn waits for the one before; without: recorded times"
    )
    when.add_argument(
        "--closed-loop", action="store_true", help="the next in order as soon as one of --parallel slots is free"
    )
    when.add_argument("--parallel", type=int, metavar="P", help="most requests in flight; later ones wait")
    when.add_argument("--speedup", type=float, default=1.0, metavar="X", help="divide arrivals and pauses by X")
    when.add_argument(
        "--max-think", type=duration, metavar="TIME", help="cut longer pauses within sessions to TIME, such as 5s"
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    part = parser.add_argument_group("which part of the trace")
    part.add_argument("--start", type=duration, metavar="TIME", help="only arrivals from TIME on, on the trace's clock")
    part.add_argument("--end", type=duration, metavar="TIME", help="only arrivals before TIME")
    part.add_argument("--limit", type=int, metavar="N", help="of these the first N by arrival")
    part.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="all of it N times in a row, sharing nothing (1)"
    )


def _add_content(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is sent")
    what.add_argument(
        "--api",
        choices=get_args(ReplayApi),
        default="completions",
        help="token ids, or words of a token each; auto: each request as it was captured (completions)",
    )
    what.add_argument("--cold-prompts", action="store_true", help="tokens of its own for every request: no hits")
    what.add_argument(
        "--no-output-substitution",
        action="store_true",
        help="send made-up tokens where a prompt repeats an earlier output; by default this run's own output tokens",
    )
    what.add_argument("--nonce", metavar="WORD", help="the tokens of an earlier run (default: new ones)")


def _add_target(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("the engine")
    target.add_argument(
        "--reset-cache", action="store_true", help="empty the engine's prefix cache first, and check that it is"
    )
    target.add_argument(
        "--session-header",
        action="append",
        metavar="NAME",
        help=f"header with the session's id, for routers; may be repeated ({SESSION_HEADER})",
    )
    target.add_argument(
        "--lora-map",
        action="append",
        default=[],
        metavar="A=B",
        help="send requests of the trace's adapter A with the engine's B (empty: without); may be repeated",
    )


def command() -> None:
    """Entry point of the ``replay`` console script."""
    run_command("replay", main)


if __name__ == "__main__":
    command()
