"""Command line of ``tracefile``."""

from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tracefile.commandline.durations import duration, duration_or_moment
from tracefile.commandline.parser import Parser, seed
from tracefile.exporters.formats import TARGETS
from tracefile.records.schema import TraceFormat

FORMATS_READ = ", ".join(get_args(TraceFormat))
OUTPUT_HELP = "a .gz or .zst suffix compresses, .parquet makes columns"


Actions: TypeAlias = "_SubParsersAction[Parser]"


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one call of the command."""

    action: Literal["info", "check", "cat", "convert", "cut", "anonymize", "join", "synthesize"]
    trace: str = ""
    traces: tuple[str, ...] = ()
    """Traces of ``join``, in order."""
    as_json: bool = False
    output: str | None = None
    overwrite: bool = False
    sessions: bool = False
    to: str = "kvtape"
    block_size: int | None = None
    align: bool = False
    from_s: float = 0.0
    to_s: float | None = None
    """Null: to the trace's end."""
    most_sessions: int | None = None
    round_s: float = 0.01
    scale: float | None = None
    mean_session: bool = False
    spread: float = 1.0
    seed: int = 0
    head: int | None = None
    """Records that ``cat`` prints; null: all."""


def parse_config(argv: Sequence[str]) -> Config:
    """Return the command line as a Config."""
    parser = Parser(prog="tracefile", description="Inspect, check, convert, cut, join and scale traces.")
    actions = parser.add_subparsers(dest="action", required=True)
    _add_readers(actions)
    _add_convert(actions)
    _add_parts(actions)
    _add_join(actions)
    _add_synthesize(actions)
    return Config(**vars(parser.parse_args(argv)))


def _add_readers(actions: Actions) -> None:
    """Add the commands that print: info, check, cat."""
    info = _reader(actions, "info", "summarise a trace: counts, time span, sessions, shared prefixes", "")
    info.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object instead of tables")
    _reader(actions, "check", "check a trace against the schema; exit 1 and list the lines that break a rule", "")
    cat = _reader(actions, "cat", "print a trace as JSON Lines", "--head 3")
    cat.add_argument("--head", type=int, help="print the first N records only (default: all)")


def _add_convert(actions: Actions) -> None:
    convert = _reader(
        actions, "convert", "write a trace of any known format in this schema, or in another format", "monday.parquet"
    )
    convert.add_argument("output", metavar="OUT", help=OUTPUT_HELP)
    convert.add_argument(
        "--to", choices=["kvtape", *TARGETS], default="kvtape", metavar="FORMAT", help=f"kvtape, {', '.join(TARGETS)}"
    )
    convert.add_argument(
        "--block-size",
        type=int,
        help="tokens in a block: a multiple of the trace's, or a divisor if it tells to the token where prompts part "
        "(default: the trace's, or 512 for Mooncake where that is a multiple)",
    )
    _overwrites(convert)
    convert.add_argument(
        "--sessions", action="store_true", help="infer sessions from shared prefixes for records without one"
    )


def _add_parts(actions: Actions) -> None:
    """Add the commands that write less of a trace: cut, anonymize."""
    cut = _reader(
        actions, "cut", "write the sessions that begin in a span of time, whole", "--from 1h --to 2h -o hour.jsonl.zst"
    )
    cut.add_argument(
        "--from",
        dest="from_s",
        type=duration_or_moment,
        default="0",
        metavar="TIME",
        help="time from the first arrival, such as 10m, or a date in UTC, such as 2026-11-20T14:00",
    )
    cut.add_argument(
        "--to",
        dest="to_s",
        type=duration_or_moment,
        metavar="TIME",
        help="end of the span, such as 20m, or a date (default: all)",
    )
    cut.add_argument("--sessions", dest="most_sessions", type=int, help="the first N sessions only (default: all)")
    _writes(cut)
    anonymous = _reader(
        actions,
        "anonymize",
        "write a trace with new hashes and ids, rounded times, no date, names, headers or unknown fields",
        "-o public.jsonl.zst",
    )
    anonymous.add_argument("--round", dest="round_s", type=duration, default="10ms", help="grain of every time")
    _writes(anonymous)


def _add_join(actions: Actions) -> None:
    summary = "write a trace that is in segments, or in several files, as one file"
    join = _command(actions, "join", summary, "host-1.jsonl.zst host-2.jsonl.zst --align -o both.jsonl.zst")
    join.add_argument("traces", metavar="TRACE", nargs="+", help="a folder of segments, a manifest, or files in order")
    join.add_argument(
        "--align", action="store_true", help="join traces of several clocks: shift times to the first's, merge by end"
    )
    _writes(join)


def _add_synthesize(actions: Actions) -> None:
    synthesis = _reader(
        actions, "synthesize", "scale a trace: more, or less, of the same traffic", "--scale 2.5 -o more.jsonl.zst"
    )
    size = synthesis.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--scale", type=float, help="conversations, as a multiple of the trace's (required, or --mean-session)"
    )
    size.add_argument(
        "--mean-session", action="store_true", help="replace every session by the mean one, to see what averaging hides"
    )
    synthesis.add_argument(
        "--spread",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of the added conversations that get new prefixes; the rest reuse existing ones",
    )
    synthesis.add_argument("--seed", type=seed, default=0, help="seed of draws and new hashes")
    _writes(synthesis, default="/dev/stdout")


def _reader(actions: Actions, name: str, summary: str, words: str) -> Parser:
    """Add a command of one trace; ``words``: those after it in the example."""
    parser = _command(actions, name, summary, f"monday.jsonl.zst {words}")
    parser.add_argument("trace", help=f"a trace: {FORMATS_READ}; .gz, .zst or .parquet")
    return parser


def _command(actions: Actions, name: str, summary: str, words: str) -> Parser:
    epilog = f"examples:\n  tracefile {name} {words.strip()}\n"
    return actions.add_parser(name, help=summary, description=summary, epilog=epilog)


def _writes(parser: ArgumentParser, default: str | None = None) -> None:
    """Add the flags of a command that writes a trace."""
    parser.add_argument("-o", "--output", required=default is None, default=default, metavar="OUT", help=OUTPUT_HELP)
    _overwrites(parser)


def _overwrites(parser: ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
