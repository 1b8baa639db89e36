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
"loadgen selftest" measures what this machine can send, and how true its times are, without an engine;
"--pattern calibration" is another thing: the load whose capture "sim fit" learns an engine's step times from.
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
    when = parser.add_argument_group("when", "a session is one request, unless it has turns")
    when.add_argument("--pattern", choices=get_args(Pattern), default="poisson", help="how sessions arrive (poisson)")
    when.add_argument(
        "--rate", metavar="R", help="sessions a second; staircase, ramp: A:B, from A to B; left out: closed loop"
    )
    when.add_argument(
        "--burstiness", type=float, metavar="B", help="gamma: below 1 burstier than poisson, above evener"
    )
    when.add_argument("--burst-size", type=int, metavar="K", help="burst: so many at once")
    when.add_argument(
        "--burst-every", type=duration, metavar="TIME", help="burst: interval between bursts, such as 10s"
    )
    when.add_argument("--steps", type=int, metavar="N", help="staircase: so many, from A to B")
    when.add_argument(
        "--step-duration", type=duration, metavar="TIME", help="staircase: duration of each step, such as 30s"
    )
    when.add_argument("--rate-series", type=Path, metavar="FILE", help="series: CSV or JSONL of t_s and rate")
    when.add_argument(
        "--rate-between", choices=["steps", "lines"], default="steps", help="series: hold each rate, or go to the next"
    )
    when.add_argument("--spacing", choices=get_args(Spacing), help="staircase, ramp, series: gaps (poisson)")
    when.add_argument("--seed", type=int, default=0, metavar="K", help="of arrivals, lengths and tokens (0)")


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    bounds = parser.add_argument_group("how much")
    bounds.add_argument(
        "--duration", type=duration, metavar="TIME", help="start no session after TIME, such as 5m; open ones finish"
    )
    bounds.add_argument("--number", type=int, metavar="N", help="sessions in all; a dataset is begun again if need be")
    bounds.add_argument("--parallel", type=int, metavar="P", help="most requests in flight (calibration: 8)")
    bounds.add_argument("--parallel-sessions", type=int, metavar="P", help="most sessions open, pauses included")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what", f"lengths: {FORMS}")
    what.add_argument("--api", choices=get_args(Api), default="completions", help="what is sent to (completions)")
    what.add_argument("--chat-template", action="store_true", help="apply it here, send the chat's ids as completions")
    what.add_argument(
        "--prompt-tokens", metavar="N", help="new tokens of a turn, prefix apart (256; calibration: 64:10000)"
    )
    what.add_argument("--output-tokens", metavar="N", help="generated, exactly (as the dataset says, else 16)")
    what.add_argument("--prefix-count", type=int, default=0, metavar="K", help="shared prefixes to choose from (0)")
    what.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="their length (0)")
    what.add_argument("--turns", metavar="T", help="of a random session (1)")
    what.add_argument(
        "--think",
        metavar="TIME",
        help="pause from a response's end to the next turn, such as 2s or 1s:5s (dataset's, else 0)",
    )


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("datasets", f"NAME is one of {', '.join(DATASETS)}")
    data.add_argument("--dataset", default=RANDOM, metavar="NAME:PATH", help="sessions from a file (random)")
    data.add_argument("--dataset-offset", type=int, default=0, metavar="N", help="leave out its first N sessions (0)")
    data.add_argument("--min-turns", type=int, metavar="N", help="only sessions of so many turns (random: at least)")
    data.add_argument("--max-turns", type=int, metavar="N", help="cut longer sessions (random: at most)")
    data.add_argument("--first-turn-length", metavar="N", help="swe-smith: tokens of the first turn (65000)")
    data.add_argument("--subsequent-turn-length", metavar="N", help="swe-smith: tokens of each later turn (500)")
    data.add_argument(
        "--tool-role", choices=["user", "tool"], default="user", help="whose messages tool outputs are, on --api chat"
    )


def command() -> None:
    """Entry point of the ``loadgen`` console script."""
    run_command("loadgen", main)


if __name__ == "__main__":
    command()
