"""Settings and flags common to loadgen and replay: target, tokenizer, request fields, trace, processes, SLOs."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.access import HEADER_NAME, OPEN, RESERVED_HEADERS, Access, add_access_arguments, read_access
from engines.detection import CHOICES
from loadgen.core.bodyfields import PLAIN, BodyFields, parse_extra_body
from loadgen.core.request import SESSION_HEADER
from loadgen.core.vocabulary import ORDINARY, Vocabulary
from measure.metrics.flags import add_gpus_argument, add_slo_arguments, checked_gpus
from tracefile.commandline.durations import duration
from tracefile.commandline.parser import Parser
from tracefile.records.errors import InputError

if TYPE_CHECKING:
    from measure.thresholds import Threshold

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run besides its load; workers get them unchanged."""

    url: str
    trace: Path
    model: str = AUTO
    dialect: str = AUTO
    """Engine of the request fields; ``auto``: detect the engine."""
    tokenizer: str = AUTO
    """Path, ``engine`` or ``none``; ``auto``: the engine's tokenizer if it has /tokenize."""
    fields: BodyFields = PLAIN
    """Fields of every body besides those of the plan."""
    session_headers: tuple[str, ...] = (SESSION_HEADER,)
    vocabulary: Vocabulary = ORDINARY
    timeout_s: float | None = 600.0
    overwrite: bool = False
    as_json: bool = False
    """Print the summary as one JSON object on stdout, its lines on stderr."""
    procs: int | None = 1
    """Worker processes; null: one a core of this machine or the Ray cluster."""
    ray: str | None = None
    """Address of the Ray cluster that runs the workers; null: this machine."""
    access: Access = OPEN
    """Keys, headers and TLS of every request and control call."""
    gpus: int | None = None
    """GPUs of the engine, for the trace header; null: not given."""
    slos: tuple["Threshold", ...] = ()
    """Latency and throughput objectives, checked at the end of the run."""

    def __post_init__(self) -> None:
        if self.procs is not None and self.procs < 1:
            raise InputError(f"--procs: {self.procs}; expected 1 or more, or {AUTO}")
        if self.dialect not in CHOICES:
            raise InputError(f"--dialect: {self.dialect!r}; expected one of {', '.join(CHOICES)}")
        check_positive("--timeout", self.timeout_s)


def check_positive(flag: str, value: float | None) -> None:
    if value is not None and not (0 < value < math.inf):
        raise InputError(f"{flag}: {value:g}; expected a number above 0")


def add_target_arguments(parser: Parser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="base URL of the engine, or of its tap")
    parser.add_argument(
        "-o",
        "--output",
        "--out",
        type=Path,
        metavar="TRACE",
        help="trace to write; .gz and .zst compress (default: a new name in this folder)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing trace")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object; text goes to stderr")
    parser.add_argument("--model", default=AUTO, metavar="NAME", help="served model name; auto: first of /v1/models")
    parser.add_argument(
        "--dialect", choices=CHOICES, default=AUTO, help="request fields of which engine; auto: detect the engine"
    )
    parser.add_argument(
        "--tokenizer",
        default=AUTO,
        metavar="PATH",
        help="tokenizer of text prompts: a directory, engine, or none; auto: the engine's, if it has /tokenize",
    )
    parser.add_argument(
        "--extra-body",
        metavar="JSON",
        help='extra fields merged into each body, such as {"temperature": 0.7} (null removes a field); not for '
        "model, prompts, lengths, stream",
    )
    parser.add_setting("--vocab-low", type=int, default=1000, metavar="ID", help="lowest token id in prompts")
    parser.add_setting("--vocab-high", type=int, default=100_000, metavar="ID", help="token ids in prompts stay below")
    parser.add_argument("--timeout", type=duration, default="10m", help="time limit of a request")
    parser.add_setting(
        "--session-header",
        action="append",
        metavar="NAME",
        help=f"header with the session id, for routers; repeatable (default {SESSION_HEADER})",
    )


def add_run_arguments(parser: Parser) -> None:
    """Add the flags of access, SLOs and processes: in the help after the flags of the load."""
    add_access_arguments(parser, "every request and control call")
    metrics = parser.add_argument_group("metrics at the end")
    add_gpus_argument(metrics)
    add_slo_arguments(metrics)
    run = parser.add_argument_group("processes and machines")
    run.add_argument("--procs", default="1", metavar="N", help="sending processes; auto: one a core")
    run.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run them on this Ray cluster, such as head:6379; auto: the local cluster",
    )


def run_settings(args: argparse.Namespace, *, stream: bool = True) -> dict[str, Any]:
    """Return the values of ``RunSettings`` whose names differ from their flags."""
    from measure.metrics.slos import parse_slos  # noqa: PLC0415 - --help needs no numpy

    return {
        "fields": BodyFields(stream=stream, extra=parse_extra_body(args.extra_body)),
        "session_headers": session_headers(args.session_header),
        "vocabulary": Vocabulary(args.vocab_low, args.vocab_high),
        "timeout_s": args.timeout,
        "as_json": args.json,
        "procs": parse_procs(args.procs),
        "access": read_access(args, api=args.api, url=args.url),
        "gpus": checked_gpus(args.gpus),
        "slos": parse_slos(args.slo),
    }


def session_headers(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of ``--session-header``, or the default. Raises InputError for a reserved header."""
    for name in names or ():
        if not HEADER_NAME.fullmatch(name) or name.lower() in RESERVED_HEADERS:
            raise InputError(f"--session-header: {name!r}; expected a header name that requests do not use yet")
    return tuple(names or (SESSION_HEADER,))


def parse_procs(text: str) -> int | None:
    if text == AUTO:
        return None
    if not text.isdecimal():
        raise InputError(f"--procs: {text!r}; expected an integer, or {AUTO}")
    return int(text)
