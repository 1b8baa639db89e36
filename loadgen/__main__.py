"""``loadgen``: synthetic load against an OpenAI-compatible engine, with a trace of what it saw."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, overload

from loadgen.core.draws import Vocabulary
from loadgen.core.lengths import FORMS, LengthDistribution, parse_lengths, parse_pause
from loadgen.core.runflags import add_target_arguments, run_flags
from loadgen.datasets import DATASETS
from loadgen.plan.arrivals import read_rate_series
from loadgen.plan.config import RANDOM, STAGED_PARALLEL, STAGED_PROMPT, USUAL_PROMPT, LoadConfig, Pattern, Spacing
from loadgen.running import run_load
from loadgen.text.spoken import Api
from tracefile import InputError
from tracefile.commandline.durations import duration
from tracefile.commandline.ending import run_command
from tracefile.commandline.parser import Parser

EPILOG = """\
Exit status: 0 done; 1 no request ended well; 2 bad input; 130 cut short by Ctrl-C or SIGTERM (what is in flight is
recorded as client_abort, the trace is complete). The same seed and flags make the same load on every machine.
"loadgen selftest" measures the rate and the timing accuracy of loadgen on this machine, without an engine.
"--pattern calibration" is the load whose capture "sim fit" and "sim calibrate" learn an engine's step times from.
"""


def main(argv: Sequence[str]) -> int:
    """Parse ``argv`` and run the load, or measure what this machine can send."""
    if argv[:1] == ["selftest"]:
        from loadgen.selftest.command import main as selftest  # noqa: PLC0415 - no run needs it

        return selftest(argv[1:])
    return run_load(parse_config(argv))


def parse_config(argv: Sequence[str]) -> LoadConfig:
    """The config of a command line; raises InputError naming the flag."""
    args = _parser().parse_args(argv)
    dataset, dataset_path = parse_dataset(args.dataset)
    rate, rate_to = parse_rate(args.rate)
    turns, min_turns, max_turns = _turns(args, dataset_path)
    return LoadConfig(
        url=args.url,
        trace=args.output,
        model=args.model,
        dialect=args.dialect,
        api=args.api,
        tokenizer=args.tokenizer,
        chat_template=args.chat_template,
        pattern=args.pattern,
        rate=rate,
        rate_to=rate_to,
        burstiness=args.burstiness,
        spacing=args.spacing,
        burst_size=args.burst_size,
        burst_every_s=args.burst_every,
        steps=args.steps,
        step_s=args.step_duration,
        rate_series=() if args.rate_series is None else read_rate_series(args.rate_series),
        rate_between=args.rate_between,
        duration_s=args.duration,
        number=args.number,
        parallel=STAGED_PARALLEL if args.pattern == "calibration" and args.parallel is None else args.parallel,
        parallel_sessions=args.parallel_sessions,
        seed=args.seed,
        dataset=dataset,
        dataset_path=dataset_path,
        dataset_offset=args.dataset_offset,
        first_turn_tokens=_lengths("--first-turn-length", args.first_turn_length),
        subsequent_turn_tokens=_lengths("--subsequent-turn-length", args.subsequent_turn_length),
        prompt_tokens=_prompts(args),
        output_tokens=_lengths("--output-tokens", args.output_tokens),
        prefix_count=args.prefix_count,
        prefix_tokens=args.prefix_tokens,
        turns=turns,
        min_turns=min_turns,
        max_turns=max_turns,
        think_s=None if args.think is None else parse_pause("--think", args.think),
        tool_role=args.tool_role,
        vocabulary=Vocabulary(args.vocab_low, args.vocab_high),
        timeout_s=args.timeout,
        overwrite=args.overwrite,
        as_json=args.json,
        run=run_flags(args),
    )


def parse_dataset(text: str) -> tuple[str, Path | None]:
    """``random``, or ``NAME:PATH``; raises InputError."""
    name, _, path = text.partition(":")
    if name == RANDOM and not path:
        return RANDOM, None
    if name not in DATASETS:
        raise InputError(f"--dataset: {text!r}; expected {RANDOM}, or NAME:PATH with NAME one of {', '.join(DATASETS)}")
    if not path:
        raise InputError(f"--dataset: {name} without a file; expected {name}:PATH")
    if not Path(path).exists():
        raise InputError(f"--dataset: {path}: not there; expected a file of sessions")
    return name, Path(path)


def parse_rate(text: str | None) -> tuple[float | None, float | None]:
    """``R``, or ``A:B``; raises InputError."""
    if text is None:
        return None, None
    try:
        rate, *to = (float(part) for part in text.split(":", 1))
    except ValueError:
        raise InputError(f"--rate: {text!r}; expected a number R, or A:B") from None
    return rate, to[0] if to else None


@overload
def _lengths(flag: str, text: str) -> LengthDistribution: ...
@overload
def _lengths(flag: str, text: None) -> None: ...
def _lengths(flag: str, text: str | None) -> LengthDistribution | None:
    return None if text is None else parse_lengths(flag, text, minimum=1, whole=True)


def _prompts(args: argparse.Namespace) -> LengthDistribution:
    """Return the prompt lengths of the flag, or the pattern's default."""
    usual = STAGED_PROMPT if args.pattern == "calibration" else USUAL_PROMPT
    return (
        usual
        if args.prompt_tokens is None
        else parse_lengths("--prompt-tokens", args.prompt_tokens, minimum=1, whole=True)
    )


def _turns(args: argparse.Namespace, dataset_path: Path | None) -> tuple[LengthDistribution, int | None, int | None]:
    """Return the turns of random sessions, and the bounds on a dataset's; raises InputError."""
    if args.turns is not None and (args.min_turns, args.max_turns) != (None, None):
        raise InputError("--turns: with --min-turns or --max-turns; expected one way to say it")
    if dataset_path is not None:
        if args.turns is not None:
            raise InputError("--turns: with a dataset's file; expected --min-turns and --max-turns")
        return LengthDistribution(1, 1), args.min_turns, args.max_turns
    if args.turns is not None:
        return _lengths("--turns", args.turns), None, None
    fewest = args.min_turns or 1
    text = f"{fewest}:{args.max_turns or fewest}"
    return parse_lengths("--min-turns, --max-turns", text, minimum=1, whole=True), None, None


def _parser() -> Parser:
    parser = Parser(prog="loadgen", description=__doc__, epilog=EPILOG, commands=["selftest"])
    add_target_arguments(parser)
    _add_timing(parser)
    _add_bounds(parser)
    _add_shape(parser)
    _add_dataset(parser)
    return parser


def _add_timing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals", "a session is one request, unless it has turns")
    add = group.add_argument
    add("--pattern", choices=get_args(Pattern), default="poisson", help="arrivals of sessions (poisson)")
    add("--rate", metavar="R", help="sessions a second; staircase and ramp: A:B, from A to B; without: closed loop")
    add("--burstiness", type=float, metavar="B", help="gamma: shape of the gaps; 1 is poisson, below 1 is burstier")
    add("--burst-size", type=int, metavar="K", help="burst: sessions a burst")
    add("--burst-every", type=duration, metavar="TIME", help="burst: interval between bursts, such as 10s")
    add("--steps", type=int, metavar="N", help="staircase: number of steps from rate A to rate B")
    add("--step-duration", type=duration, metavar="TIME", help="staircase: duration of each step, such as 30s")
    add("--rate-series", type=Path, metavar="FILE", help="series: CSV or JSONL with columns t_s and rate")
    add(
        "--rate-between",
        choices=["steps", "lines"],
        default="steps",
        help="series: keep each rate until the next row, or interpolate (steps)",
    )
    add("--spacing", choices=get_args(Spacing), help="staircase, ramp, series: gaps at a rate (poisson)")
    add("--seed", type=int, default=0, metavar="K", help="seed of arrivals, lengths and tokens (0)")


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("amount").add_argument
    add("--duration", type=duration, metavar="TIME", help="start no session after TIME, such as 5m; open ones finish")
    add("--number", type=int, metavar="N", help="total sessions; a shorter dataset starts again")
    add("--parallel", type=int, metavar="P", help="concurrency limit: most requests in flight (calibration: 8)")
    add("--parallel-sessions", type=int, metavar="P", help="most open sessions, those in a pause included")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("content", f"N of lengths: {FORMS}").add_argument
    add("--api", choices=get_args(Api), default="completions", help="API to send to (completions: token ids)")
    add(
        "--chat-template",
        action="store_true",
        help="apply the model's chat template here, and send chats as token ids to /v1/completions",
    )
    add("--prompt-tokens", metavar="N", help="new tokens of each turn, without the prefix (256; calibration: 64:10000)")
    add("--output-tokens", metavar="N", help="exact output tokens of each request (the dataset's, else 16)")
    add("--prefix-count", type=int, default=0, metavar="K", help="number of shared prefixes; 0: none (0)")
    add("--prefix-tokens", type=int, default=0, metavar="N", help="tokens of each shared prefix (0)")
    add("--turns", metavar="N", help="turns of a random session (1)")
    add(
        "--think",
        metavar="TIME",
        help="pause from a response's end to the next turn, such as 2s or 1s:5s (dataset's, else 0)",
    )


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("dataset", f"NAME is one of {', '.join(DATASETS)}").add_argument
    add("--dataset", default=RANDOM, metavar="NAME:PATH", help="sessions from a file (random: none)")
    add("--dataset-offset", type=int, default=0, metavar="N", help="skip the first N sessions of the file (0)")
    add("--min-turns", type=int, metavar="N", help="skip shorter sessions (random: fewest turns)")
    add("--max-turns", type=int, metavar="N", help="cut longer sessions (random: most turns)")
    add("--first-turn-length", metavar="N", help="swe-smith: tokens of the first turn (65000)")
    add("--subsequent-turn-length", metavar="N", help="swe-smith: tokens of each later turn (500)")
    add("--tool-role", choices=["user", "tool"], default="user", help="role of tool outputs with --api chat (user)")


def command() -> None:
    """Entry point of the ``loadgen`` console script."""
    run_command("loadgen", main)


if __name__ == "__main__":
    command()
