"""Flags of a load, and the settings that they make."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from loadgen.core.bodyfields import BodyFields, read_body_fields
from loadgen.core.lengths import FORMS, LengthDistribution, parse_pause, parse_tokens
from loadgen.core.request import session_headers
from loadgen.core.runflags import RunFlags, add_target_arguments, run_flags
from loadgen.core.vocabulary import Vocabulary
from loadgen.datasets import DATASETS, RANDOM, SHIPPED, parse_dataset
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
    Spacing,
)
from loadgen.runs.merging import refuse_lost_inputs
from loadgen.text.spoken import Api
from tracefile import InputError
from tracefile.commandline.durations import duration, seconds
from tracefile.commandline.parser import Parser, same_named
from tracefile.storage.output import output_name

DESCRIPTION = "Synthetic load against an OpenAI-compatible engine, with a trace of what it saw."
EPILOG = """\
Exit status: 0 done; 1 no request ended well; 2 bad input; 130 cut short by Ctrl-C or SIGTERM (what is in flight is
recorded as client_abort, the trace is complete). The same flags make the same load on every machine, with other tokens
in every run; equal --nonce: equal tokens, which an engine's prefix cache may still hold.
"loadgen sweep" runs a load at several concurrencies or rates, on one engine or on several in turn.
"loadgen build-dataset" cuts a dataset's sessions once, for runs that start at once.
"--pattern calibration" is the load whose capture "sim calibrate" learns an engine's step times from.

examples:
  loadgen --url http://localhost:8001 --number 50 -o load.jsonl.zst
  loadgen --url http://localhost:8001 --rate 2 --duration 5m --prefix-count 4 --prefix-tokens 2000 --turns 1:4
"""


def parse_config(argv: Sequence[str], prog: str = "loadgen") -> LoadConfig:
    parser = load_parser(prog)
    args = parser.parse_args(argv)
    dataset, dataset_path, output = _files(args)
    _size_for(args)
    rate, rate_to = parse_rate(args.rate)
    number, parallel = _bounds(args, dataset_path)
    turns, min_turns, max_turns = _turns(args, dataset_path)
    made = {
        "trace": output,
        "rate": rate,
        "rate_to": rate_to,
        "group_size": _group_size(args),
        "group_gap_s": None if args.group_gap is None else parse_pause("--group-gap", args.group_gap),
        "burst_every_s": args.burst_every,
        "step_s": args.step_duration,
        "rate_series": _rate_series(args.rate_series),
        "duration_s": args.duration,
        "number": number,
        "parallel": parallel,
        "dataset": dataset,
        "dataset_path": dataset_path,
        "first_turn_tokens": parse_tokens("--first-turn-length", args.first_turn_length),
        "subsequent_turn_tokens": parse_tokens("--subsequent-turn-length", args.subsequent_turn_length),
        "prompt_tokens": _prompts(args),
        "output_tokens": parse_tokens("--output-tokens", args.output_tokens),
        "prefix_count": int(args.prefix_tokens > 0) if args.prefix_count is None else args.prefix_count,
        "turns": turns,
        "min_turns": min_turns,
        "max_turns": max_turns,
        "think_s": None if args.think is None else parse_pause("--think", args.think),
        "tool_latency_s": None if args.tool_latency is None else parse_pause("--tool-latency", args.tool_latency),
        "fields": _fields(args),
        "session_headers": session_headers(args.session_header),
        "vocabulary": Vocabulary(args.vocab_low, args.vocab_high),
        "timeout_s": args.timeout,
        "as_json": args.json,
        "run": _run_flags(args),
    }
    return LoadConfig(**(same_named(LoadConfig, args) | made))


def _files(args: argparse.Namespace) -> tuple[str, Path | None, Path]:
    """Return the dataset's name and file, and the trace. Raises InputError if a file is both read and written."""
    dataset, dataset_path = parse_dataset(args.dataset)
    output = Path(output_name(args.output, "loadgen", resume=args.resume))
    refuse_lost_inputs(output, [dataset_path, args.rate_series, args.for_trace])
    return dataset, dataset_path, output


def _size_for(args: argparse.Namespace) -> None:
    """Take the lengths and the concurrency of ``--for``, where no flag says them."""
    if args.for_trace is None:
        return
    if args.pattern != "calibration":
        raise InputError(f"--for: with --pattern {args.pattern}; expected --pattern calibration")
    from loadgen.plan.stages import sized_for  # noqa: PLC0415 - --help needs no numpy

    prompts, parallel = sized_for(args.for_trace)
    args.prompt_tokens = args.prompt_tokens or f"{prompts.low}:{prompts.high}"
    args.parallel = args.parallel or parallel


def _rate_series(file: Path | None) -> tuple[tuple[float, float], ...]:
    if file is None:
        return ()
    from loadgen.plan.arrivals import read_rate_series  # noqa: PLC0415 - --help needs no numpy

    return read_rate_series(file)


def _run_flags(args: argparse.Namespace) -> RunFlags:
    flags = run_flags(args)
    if args.no_stream:
        from measure.metrics.slos import refuse_without_streams  # noqa: PLC0415 - --help needs no numpy

        refuse_without_streams(flags.slos)
    return flags


def _bounds(args: argparse.Namespace, dataset_path: Path | None) -> tuple[int | None, int | None]:
    """Sessions, and requests in flight: a small closed loop where no flag says when sessions begin, or how many."""
    number, parallel = args.number, args.parallel
    if args.pattern == "calibration":
        return number, STAGED_PARALLEL if parallel is None else parallel
    if args.rate is not None or args.pattern not in CLOSED_PATTERNS:
        return number, parallel
    if parallel is None and args.parallel_sessions is None:
        parallel = CLOSED_PARALLEL
    if number is None and args.duration is None and dataset_path is None:
        at_once = parallel if args.parallel_sessions is None else args.parallel_sessions
        number = max(1, CLOSED_ROUNDS * at_once // max(1, _group_size(args)))  # what is below 1 is refused later
    return number, parallel


def parse_rate(text: str | None) -> tuple[float | None, float | None]:
    if text is None:
        return None, None
    try:
        rate, *to = (float(part) for part in text.split(":", 1))
    except ValueError:
        raise InputError(f"--rate: {text!r}; expected a number R, or A:B") from None
    return rate, to[0] if to else None


def _group_size(args: argparse.Namespace) -> int:
    usual = USUAL_GROUP if args.pattern == "rollouts" else 1
    return usual if args.group_size is None else int(args.group_size)


def _fields(args: argparse.Namespace) -> BodyFields:
    """Request fields; a group's outputs are sampled, or they would be one and the same."""
    fields = read_body_fields(args, stream=not args.no_stream)
    sampled = _group_size(args) > 1 and fields.temperature is None and "temperature" not in fields.extra
    return replace(fields, temperature=1.0) if sampled else fields


def _prompts(args: argparse.Namespace) -> LengthDistribution:
    usual = STAGED_PROMPT if args.pattern == "calibration" else USUAL_PROMPT
    return usual if args.prompt_tokens is None else parse_tokens("--prompt-tokens", args.prompt_tokens)


def _turns(args: argparse.Namespace, dataset_path: Path | None) -> tuple[LengthDistribution, int | None, int | None]:
    if args.turns is not None and (args.min_turns, args.max_turns) != (None, None):
        raise InputError("--turns: with --min-turns or --max-turns; expected one way to say it")
    if dataset_path is not None:
        if args.turns is not None:
            raise InputError("--turns: with a dataset's file; expected --min-turns and --max-turns")
        return LengthDistribution(1, 1), args.min_turns, args.max_turns
    if args.turns is not None:
        return parse_tokens("--turns", args.turns), None, None
    fewest = args.min_turns or 1
    text = f"{fewest}:{args.max_turns or fewest}"
    return parse_tokens("--min-turns, --max-turns", text), None, None


def load_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG, commands=["build-dataset", "sweep"])
    add_load_arguments(parser)
    return parser


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    _add_timing(parser)
    _add_bounds(parser)
    _add_shape(parser)
    _add_dataset(parser)


def _add_timing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals", "a session is one request, unless it has turns")
    add = group.add_argument
    add("--pattern", choices=get_args(Pattern), default="poisson", help="arrivals of sessions")
    add(
        "--rate",
        metavar="R",
        help="sessions or groups a second, such as 0.5; staircase and ramp: A:B (default: none, a closed loop)",
    )
    add(
        "--burstiness",
        type=float,
        help="shape of the gaps between arrivals; 1: poisson, below 1: burstier, inf: even (required with gamma)",
    )
    add("--group-size", type=int, help="sessions that start from one first prompt (default 1; rollouts: 8)")
    add(
        "--group-gap",
        metavar="TIME",
        help="pause between starts of a group's sessions, such as 200ms or 0s:2s (default 0: together)",
    )
    add("--burst-size", type=int, metavar="K", help="sessions a burst (required with burst)")
    add("--burst-every", type=duration, help="interval between bursts, such as 10s (required with burst)")
    add("--steps", type=int, help="steps from rate A to rate B (required with staircase)")
    add("--step-duration", type=duration, help="duration of each step, such as 30s (required with staircase)")
    add(
        "--rate-series",
        type=Path,
        help="CSV or JSONL with columns t_s, seconds, and rate, sessions a second (required with series)",
    )
    add(
        "--rate-between",
        choices=["steps", "lines"],
        default="steps",
        help="series: keep each rate until the next row, or interpolate",
    )
    add("--spacing", choices=get_args(Spacing), help="staircase, ramp, series: gaps at a rate (default poisson)")
    add(
        "--for",
        dest="for_trace",
        type=Path,
        metavar="TRACE",
        help="calibration: prompts up to the longest of a trace, and as many in flight (default: see those flags)",
    )
    add("--seed", type=int, default=0, metavar="K", help="seed of arrivals and lengths, and with --nonce of tokens")
    add(
        "--nonce",
        metavar="WORD",
        help="seed of tokens; the nonce in an earlier run's header sends its tokens again (default: random)",
    )


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("amount").add_argument
    add("--duration", type=seconds, help="start no session after TIME, such as 5m; a number alone is seconds")
    add(
        "--at-end",
        choices=["finish", "cancel"],
        default="finish",
        help="at --duration: let open sessions finish, or cancel requests in flight and send no more",
    )
    add(
        "--number",
        type=int,
        help=f"sessions or groups; a shorter dataset starts again (default: the dataset's, or {CLOSED_ROUNDS} for "
        "each in --parallel)",
    )
    add(
        "--parallel",
        type=int,
        help=f"most requests in flight (default: none; closed loop {CLOSED_PARALLEL}, calibration {STAGED_PARALLEL})",
    )
    add("--parallel-sessions", type=int, metavar="P", help="most open sessions, those in a pause included")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("content", f"N of lengths: {FORMS}").add_argument
    add("--api", choices=get_args(Api), default="completions", help="API to send to; completions: token ids")
    add(
        "--chat-template",
        action="store_true",
        help="with --api completions: apply the chat template here, and send chats as token ids",
    )
    add("--no-stream", action="store_true", help="ask for whole responses, which have no TTFT and no ITL")
    add(
        "--prompt-tokens",
        metavar="N",
        help="tokens of each turn, without the prefix (default 256; calibration: 64:10000)",
    )
    add("--output-tokens", metavar="N", help="exact output tokens of each request (default: the dataset's, else 16)")
    add("--prefix-count", type=int, help="shared prefixes (default 1 with --prefix-tokens, else 0)")
    add("--prefix-tokens", type=int, default=0, help="tokens of each shared prefix")
    add("--turns", metavar="N", help="turns of a random session (default 1)")
    add(
        "--think",
        metavar="TIME",
        help="pause from a response's end to the next turn, such as 2s or 1s:5s (default: the dataset's, else 0)",
    )


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("dataset", f"NAME is one of {', '.join(DATASETS)}").add_argument
    add(
        "--dataset",
        default=RANDOM,
        metavar="NAME:PATH",
        help=f"sessions from a file, such as swe-smith:trajectories.jsonl; trie:{', trie:'.join(SHIPPED)} come with "
        "kvtape; random: no file",
    )
    add("--dataset-offset", type=int, default=0, help="skip the first N sessions of the file")
    add("--min-turns", type=int, help="skip sessions of fewer turns (random: fewest turns)")
    add("--max-turns", type=int, help="cut sessions of more turns (random: most turns)")
    add("--first-turn-length", metavar="N", help="swe-smith: tokens of the first turn (default 65000)")
    add("--subsequent-turn-length", metavar="N", help="swe-smith: tokens of each later turn (default 500)")
    add(
        "--tool-latency",
        metavar="TIME",
        help="pause before a tool's output, such as lognormal:2s,3s (default: the dataset's; random: none)",
    )
    add("--tool-role", choices=["user", "tool"], default="user", help="role of tool outputs with --api chat")
