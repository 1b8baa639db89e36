"""``loadgen``: synthetic load against an OpenAI-compatible engine, with a trace of what it saw."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadgen.config import LoadConfig, parse_span
from loadgen.draws import Vocabulary
from loadgen.running import run_load
from tracefile.commandline import run_command

EPILOG = """\
Exit status: 0 done; 1 no request ended well; 2 bad input; 130 cut short by Ctrl-C or SIGTERM (what is in flight is
recorded as client_abort, the trace is complete). The same seed and flags make the same load on every machine.
"loadgen calibrate" measures what this machine can send, and how true its times are, without an engine.
"""


def main(argv: Sequence[str]) -> int:
    """Parse ``argv`` and run the load, or measure what this machine can send."""
    if argv[:1] == ["calibrate"]:
        from loadgen.calibrationcommand import main as calibrate  # noqa: PLC0415 - no run needs it

        return calibrate(argv[1:])
    return run_load(parse_config(argv))


def parse_config(argv: Sequence[str]) -> LoadConfig:
    """The config of a command line; raises InputError naming the flag."""
    args = _parser().parse_args(argv)
    return LoadConfig(
        url=args.url,
        trace=args.trace,
        model=args.model,
        api=args.api,
        pattern=args.pattern,
        rate=args.rate,
        duration_s=args.duration,
        number=args.number,
        parallel=args.parallel,
        seed=args.seed,
        prompt_tokens=parse_span("--prompt-tokens", args.prompt_tokens, minimum=1, whole=True),
        output_tokens=parse_span("--output-tokens", args.output_tokens, minimum=1, whole=True),
        prefix_count=args.prefix_count,
        prefix_tokens=args.prefix_tokens,
        turns=args.turns,
        think_s=parse_span("--think-s", args.think_s, minimum=0, whole=False),
        vocabulary=Vocabulary(args.vocab_low, args.vocab_high),
        timeout_s=args.timeout_s,
        overwrite=args.overwrite,
        summary=args.json,
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that loadgen and replay share."""
    parser.add_argument("--url", required=True, metavar="URL", help="the engine, or a tap before it")
    parser.add_argument("--trace", required=True, type=Path, help="the trace to write (.gz and .zst compress)")
    parser.add_argument("--model", default="auto", help="model to name (auto: the first of /v1/models)")
    parser.add_argument("--vocab-low", type=int, default=1000, metavar="ID", help="lowest token id to send (1000)")
    parser.add_argument("--vocab-high", type=int, default=100_000, metavar="ID", help="ids stay below this (100000)")
    parser.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="longest request (600)")
    parser.add_argument("--overwrite", action="store_true", help="replace the trace if there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary here as JSON too")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target_arguments(parser)
    _add_timing(parser)
    _add_shape(parser)
    return parser


def _add_timing(parser: argparse.ArgumentParser) -> None:
    when = parser.add_argument_group("when")
    when.add_argument("--pattern", choices=["constant", "poisson", "multiturn"], default="poisson")
    when.add_argument(
        "--rate", type=float, metavar="R", help="requests (multiturn: sessions) a second; left out: closed loop"
    )
    when.add_argument("--duration", type=float, metavar="S", help="start nothing new after S seconds; sessions finish")
    when.add_argument("--number", type=int, metavar="N", help="requests (multiturn: sessions) in all")
    when.add_argument("--parallel", type=int, metavar="P", help="most requests in flight")
    when.add_argument("--seed", type=int, default=0, metavar="K")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what", "N or MIN:MAX, uniform, both included")
    what.add_argument("--api", choices=["completions", "chat"], default="completions")
    what.add_argument("--prompt-tokens", default="256", metavar="N", help="new tokens of a turn, prefix apart (256)")
    what.add_argument("--output-tokens", default="16", metavar="N", help="generated, exactly (16)")
    what.add_argument("--prefix-count", type=int, default=0, metavar="K", help="shared prefixes to choose from (0)")
    what.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="their length (0)")
    what.add_argument("--turns", type=int, default=1, metavar="T", help="of a session, with --pattern multiturn (1)")
    what.add_argument("--think-s", default="0", metavar="X", help="from an answer's end to the next turn (0)")


def command() -> None:
    """Entry point of the ``loadgen`` console script."""
    run_command("loadgen", main)


if __name__ == "__main__":
    command()
