"""Command line of ``tracefile``."""

from argparse import _SubParsersAction
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tracefile.commandline.durations import duration
from tracefile.commandline.parser import Parser
from tracefile.records.schema import TraceFormat

FORMATS_READ = ", ".join(get_args(TraceFormat))
FORMATS_WRITTEN = ("kvtape", "mooncake")

Actions: TypeAlias = "_SubParsersAction[Parser]"


@dataclass(frozen=True, slots=True)
class Config:
    """Arguments of one ``tracefile`` command."""

    action: Literal["info", "check", "cat", "convert"]
    trace: str = ""
    as_json: bool = False
    head: int | None = None
    """Number of records that ``cat`` prints. Null: all."""
    traces: tuple[str, ...] = ()
    """Input traces of ``convert``."""
    output: str = ""
    overwrite: bool = False
    to: str = "kvtape"
    from_s: float = 0.0
    until_s: float | None = None
    """Null: to the end of the trace."""
    infer_sessions: bool = False
    block_size: int | None = None
    anonymize: bool = False


def parse_config(argv: Sequence[str]) -> Config:
    """Parse the command line."""
    parser = Parser(prog="tracefile", description="Inspect, check, print and convert traces.")
    actions = parser.add_subparsers(dest="action", required=True)
    info = _reader(actions, "info", "summarise a trace: counts, time span, sessions, shared prefixes", "")
    info.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object instead of tables")
    _reader(actions, "check", "check a trace against the schema; list violations by line and exit with 1", "")
    cat = _reader(actions, "cat", "print a trace as JSON Lines", " --head 3")
    cat.add_argument("--head", type=int, help="print the first N records only (default: all)")
    _add_convert(actions)
    arguments = vars(parser.parse_args(argv))
    arguments["traces"] = tuple(arguments.get("traces", ()))
    return Config(**arguments)


def _add_convert(actions: Actions) -> None:
    summary = "join traces; change format, time range or block size; anonymize"
    convert = _command(
        actions,
        "convert",
        summary,
        "conversation_trace.jsonl ours.jsonl.zst",
        "host-1.jsonl.zst host-2.jsonl.zst both.jsonl.zst",
        "monday.jsonl.zst hour.jsonl.zst --from 1h --until 2h --anonymize",
    )
    convert.add_argument(
        "traces", metavar="TRACE", nargs="+", help="a trace of any format; several are joined on the clock of the first"
    )
    convert.add_argument(
        "output",
        metavar="OUT",
        help="output trace; a suffix .gz or .zst compresses it",
    )
    written = ", ".join(FORMATS_WRITTEN)
    convert.add_argument("--to", choices=FORMATS_WRITTEN, default="kvtape", metavar="FORMAT", help=written)
    convert.add_argument(
        "--from",
        dest="from_s",
        type=duration,
        default="0",
        metavar="TIME",
        help="keep complete sessions that begin at or after this time, such as 10m, from the first arrival",
    )
    convert.add_argument(
        "--until",
        dest="until_s",
        type=duration,
        metavar="TIME",
        help="keep complete sessions that begin before this time, such as 20m (default: all)",
    )
    convert.add_argument(
        "--infer-sessions",
        action="store_true",
        help="infer the sessions of records without a session id from shared prefixes",
    )
    convert.add_argument(
        "--block-size",
        type=int,
        help="tokens in a block, a multiple of the trace's (default: unchanged; 512 for Mooncake if possible)",
    )
    convert.add_argument(
        "--anonymize",
        action="store_true",
        help="replace hashes and ids, round times to 10 ms; drop dates, names, headers and unknown fields",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def _reader(actions: Actions, name: str, summary: str, words: str) -> Parser:
    """Add a command that reads one trace; ``words``: the arguments after the trace in its example."""
    parser = _command(actions, name, summary, f"monday.jsonl.zst{words}")
    parser.add_argument("trace", help=f"a trace: {FORMATS_READ}; .gz or .zst")
    return parser


def _command(actions: Actions, name: str, summary: str, *examples: str) -> Parser:
    lines = "".join(f"  tracefile {name} {words}\n" for words in examples)
    return actions.add_parser(name, help=summary, description=summary, epilog=f"examples:\n{lines}")
