"""``replay``: send a captured trace to any engine with its lengths, times and prefix sharing, but new tokens."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from loadgen.core.settings import RunSettings, add_run_arguments, add_target_arguments, run_settings
from loadgen.runs.merging import refuse_lost_inputs
from replay.config import ReplayApi, ReplayConfig, parse_loras
from tracefile.commandline.durations import duration
from tracefile.commandline.exit_codes import run_command
from tracefile.commandline.parser import Parser, same_named
from tracefile.storage.output import output_name
from tracefile.storage.segments import TRACE_SUFFIXES

DESCRIPTION = "Send a captured trace to any engine: its lengths, times and prefix sharing, with new tokens."
EPILOG = """\
Requests that the engine refused in the capture are skipped. A request cut short in the capture is sent with the number
of output tokens received there. Equal --nonce: equal tokens. Exit status: 0 done; 1 no request succeeded; 2 bad input;
130 interrupted by Ctrl-C or SIGTERM (requests in flight are recorded as client_abort, the trace is complete).

examples:
  replay monday.jsonl.zst --url http://staging:8000 --replay-sessions -o staging.jsonl.zst
"""


def parse_config(argv: Sequence[str]) -> ReplayConfig:
    args = _parser().parse_args(argv)
    args.trace = Path(output_name(args.output, f"{stem_of(args.source)}-replay"))
    refuse_lost_inputs(args.trace, [args.source])
    converted = {
        "nonce": secrets.token_hex(8) if args.nonce is None else args.nonce,
        "output_substitution": not args.no_output_substitution,
        "start_s": args.start,
        "end_s": args.end,
        "loras": parse_loras(args.lora_map),
    }
    direct = same_named(RunSettings, args) | same_named(ReplayConfig, args)
    return ReplayConfig(**(direct | run_settings(args) | converted))


def stem_of(source: Path) -> str:
    """File or folder name of a trace without format and compression suffixes."""
    name = source.name or source.resolve().name
    while Path(name).suffix in (*TRACE_SUFFIXES, ".csv"):
        name = Path(name).stem
    return name or "trace"


def _parser() -> Parser:
    parser = Parser(prog="replay", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("source", type=Path, metavar="TRACE", help="the trace to send again")
    add_target_arguments(parser)
    _add_timing(parser)
    _add_content(parser)
    add_run_arguments(parser)
    return parser


def _add_timing(parser: Parser) -> None:
    add = parser.add_argument_group("times").add_argument
    add(
        "--replay-sessions",
        action="store_true",
        help="send each turn after the previous turn's end and its think time; default: at its recorded time",
    )
    add(
        "--closed-loop",
        action="store_true",
        help="ignore recorded times: send in recorded order, --parallel requests in flight",
    )
    add(
        "--parallel",
        type=int,
        help="limit of requests in flight; the rest queue (default: no limit; required with --closed-loop)",
    )
    add("--speedup", type=float, default=1.0, help="divide arrival times and think times by X, such as 2")
    add("--start", type=duration, help="only arrivals from TIME on, on the trace's clock, such as 10m (default 0)")
    add("--end", type=duration, help="only arrivals before TIME, such as 20m (default: all)")


def _add_content(parser: Parser) -> None:
    add = parser.add_argument_group("content").add_argument
    add(
        "--api",
        choices=get_args(ReplayApi),
        default="completions",
        help="completions: token ids; others: words of one token each; auto: each request's own API",
    )
    add("--cold-prompts", action="store_true", help="send different tokens in every prompt: no prefix hits")
    add(
        "--no-output-substitution",
        action="store_true",
        help="send synthetic tokens where a prompt repeats an earlier output; default: the output tokens of this run",
    )
    add(
        "--nonce",
        metavar="WORD",
        help="seed of the tokens; the nonce in an earlier run's header repeats its tokens (default: random)",
    )
    add("--reset-cache", action="store_true", help="reset the engine's prefix cache before the run, and verify it")
    parser.add_setting(
        "--lora-map",
        action="append",
        default=[],
        metavar="A=B",
        help="send requests of the trace's adapter A to the engine's B, as sql=sql-v2 (B empty: none); may be repeated",
    )


def main(argv: Sequence[str]) -> int:
    config = parse_config(argv)
    from replay.replayrun import run_replay

    return run_replay(config)


def command() -> None:
    run_command("replay", main)


if __name__ == "__main__":
    command()
