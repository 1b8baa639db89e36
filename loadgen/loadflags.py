"""Flags of a load, and their conversion to settings."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from loadgen.core.lengths import FORMS, parse_pause, parse_tokens
from loadgen.core.settings import RunSettings, add_run_arguments, add_target_arguments, run_settings
from loadgen.datasets import DATASETS, RANDOM, parse_dataset
from loadgen.plan.config import (
    CLOSED_PARALLEL,
    CLOSED_PATTERNS,
    CLOSED_ROUNDS,
    STAGED_PARALLEL,
    STAGED_PROMPT,
    USUAL_GROUP,
    USUAL_PROMPT,
    LoadConfig,
    Pattern,
)
from loadgen.runs.merging import refuse_lost_inputs
from loadgen.text.api_messages import Api
from tracefile.commandline.durations import seconds
from tracefile.commandline.parser import Parser, same_named
from tracefile.records.errors import InputError
from tracefile.storage.output import output_name

DESCRIPTION = "Send a synthetic load to an OpenAI-compatible engine and record a trace."
EPILOG = """\
Exit status: 0 done; 1 no request succeeded; 2 bad input; 130 interrupted by Ctrl-C or SIGTERM (requests in flight are
recorded as client_abort, the trace is complete). Equal flags give equal lengths and times on every machine, with new
tokens in every run; equal --nonce: equal tokens, which may hit an engine's prefix cache.
"loadgen sweep" runs a load at several concurrencies or rates, on one or more engines.
"--pattern calibration" is the load from whose capture "sim calibrate" fits the step times of an engine.

examples:
  loadgen --url http://localhost:8001 --number 50 -o load.jsonl.zst
  loadgen --url http://localhost:8001 --rate 2 --duration 5m --prefix-count 4 --prefix-tokens 2000 --turns 1:4
"""


def parse_config(argv: Sequence[str], prog: str = "loadgen") -> LoadConfig:
    args = load_parser(prog).parse_args(argv)
    args.trace = Path(output_name(args.output, "loadgen"))
    args.dataset, args.dataset_path = parse_dataset(args.dataset)
    series = None if args.rate_series is None else Path(args.rate_series)
    refuse_lost_inputs(args.trace, [args.dataset_path, series, args.for_trace])
    settings = run_settings(args, stream=not args.no_stream)
    if args.no_stream:
        from measure.metrics.slos import refuse_without_streams

        refuse_without_streams(settings["slos"])
    direct = same_named(RunSettings, args) | same_named(LoadConfig, args)
    return LoadConfig(**(direct | settings | _load_settings(args, settings)))


def _load_settings(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    _size_for(args)
    staged = args.pattern == "calibration"
    usual = USUAL_GROUP if args.pattern == "rollouts" else 1
    group_size = usual if args.group_size is None else args.group_size
    number, parallel = _bounds(args, group_size)
    prompts = parse_tokens("--prompt-tokens", args.prompt_tokens) or (STAGED_PROMPT if staged else USUAL_PROMPT)
    fields = settings["fields"]
    if group_size > 1 and "temperature" not in fields.extra:  # otherwise all outputs of a group would be equal
        fields = replace(fields, extra={"temperature": 1.0, **fields.extra})
    return {
        "fields": fields,
        "group_size": group_size,
        "rate_series": _rate_series(args.rate_series),
        "duration_s": args.duration,
        "number": number,
        "parallel": parallel,
        "prompt_tokens": prompts,
        "output_tokens": parse_tokens("--output-tokens", args.output_tokens),
        "prefix_count": int(args.prefix_tokens > 0) if args.prefix_count is None else args.prefix_count,
        "turns": parse_tokens("--turns", args.turns),
        "think_s": None if args.think is None else parse_pause("--think", args.think),
    }


def _size_for(args: argparse.Namespace) -> None:
    """Set prompt tokens and concurrency from the trace of ``--for``, unless flags set them."""
    if args.for_trace is None:
        return
    if args.pattern != "calibration":
        raise InputError(f"--for: with --pattern {args.pattern}; expected --pattern calibration")
    from loadgen.plan.stages import sized_for

    prompts, parallel = sized_for(args.for_trace)
    args.prompt_tokens = args.prompt_tokens or f"{prompts.low}:{prompts.high}"
    args.parallel = args.parallel or parallel


def _rate_series(text: str | None) -> tuple[tuple[float, float], ...]:
    if text is None:
        return ()
    from loadgen.plan.arrivals import read_rate_series

    return read_rate_series(text)


def _bounds(args: argparse.Namespace, group_size: int) -> tuple[int | None, int | None]:
    """Sessions, and requests in flight; defaults to a small closed loop if no flag sets arrivals or their number."""
    number, parallel = args.number, args.parallel
    if args.pattern == "calibration":
        return number, STAGED_PARALLEL if parallel is None else parallel
    if args.rate is not None or args.pattern not in CLOSED_PATTERNS:
        return number, parallel
    parallel = CLOSED_PARALLEL if parallel is None else parallel
    if number is None and args.duration is None and args.dataset_path is None:
        number = max(1, CLOSED_ROUNDS * parallel // max(1, group_size))  # values below 1 are refused later
    return number, parallel


def load_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG, commands=["sweep"])
    add_load_arguments(parser)
    return parser


def add_load_arguments(parser: Parser) -> None:
    add_target_arguments(parser)
    _add_timing(parser)
    _add_content(parser)
    add_run_arguments(parser)


def _add_timing(parser: Parser) -> None:
    add = parser.add_argument_group("arrivals", "a session is one request, unless it has turns").add_argument
    add("--pattern", choices=get_args(Pattern), default="poisson", help="arrivals of sessions")
    add("--rate", type=float, metavar="R", help="sessions or groups a second, such as 0.5 (default: a closed loop)")
    add(
        "--parallel",
        type=int,
        help=f"most requests in flight (default: none; closed loop {CLOSED_PARALLEL}, calibration {STAGED_PARALLEL})",
    )
    add(
        "--number",
        type=int,
        help=f"sessions or groups; a shorter dataset is repeated (default: the dataset's, or {CLOSED_ROUNDS} a slot "
        "of --parallel)",
    )
    add("--duration", type=seconds, help="start no session after TIME, such as 5m (a plain number: seconds)")
    add(
        "--rate-series",
        metavar="SERIES",
        help="pairs of time in seconds and sessions a second, such as 0:2,60:8,120:0; or a CSV or JSONL file with t_s "
        "and rate (required with --pattern series)",
    )
    add("--group-size", type=int, help="sessions with the same first prompt (default 1; rollouts: 8)")
    add(
        "--for",
        dest="for_trace",
        type=Path,
        metavar="TRACE",
        help="calibration: prompt tokens and requests in flight up to those of a trace (default: by their flags)",
    )
    add("--seed", type=int, default=0, metavar="K", help="seed of arrivals and lengths, and with --nonce of tokens")
    add(
        "--nonce",
        metavar="WORD",
        help="seed of tokens; the nonce in an earlier run's header repeats its tokens (default: random)",
    )


def _add_content(parser: Parser) -> None:
    add = parser.add_argument_group("content", f"N of lengths: {FORMS}").add_argument
    add("--api", choices=get_args(Api), default="completions", help="API to send to; completions: token ids")
    add("--no-stream", action="store_true", help="request responses without streaming: no TTFT, no ITL")
    add(
        "--prompt-tokens",
        metavar="N",
        help="new prompt tokens of each turn, without the prefix (default 256; calibration: 64:10000)",
    )
    add("--output-tokens", metavar="N", help="exact output tokens of each request (default: the dataset's, else 16)")
    add("--prefix-count", type=int, help="shared prefixes (default 1 with --prefix-tokens, else 0)")
    add("--prefix-tokens", type=int, default=0, help="tokens of each shared prefix")
    add(
        "--turns",
        metavar="N",
        help="turns of a session (default 1); MIN:MAX of a dataset skips shorter sessions and cuts longer ones",
    )
    add(
        "--think",
        metavar="TIME",
        help="think time from a response's end to the next turn, such as 2s or 1s:5s (default: the dataset's, else 0)",
    )
    add(
        "--dataset",
        default=RANDOM,
        metavar="NAME:PATH",
        help=f"sessions from a file; NAME is one of {', '.join(DATASETS)}; random: no file",
    )
