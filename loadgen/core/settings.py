"""Settings and flags that loadgen and replay share: target, request fields, trace, processes, SLOs."""

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
    """Settings of a run beside its load; they go to the workers as they are."""

    url: str
    trace: Path
    model: str = AUTO
    dialect: str = AUTO
    """Engine of the request fields; ``auto``: ask the engine."""
    tokenizer: str = AUTO
    """Path, ``engine`` or ``none``; ``auto``: the engine's if it has /tokenize."""
    fields: BodyFields = PLAIN
    """Fields of every body beside those of the plan."""
    session_headers: tuple[str, ...] = (SESSION_HEADER,)
    vocabulary: Vocabulary = ORDINARY
    timeout_s: float | None = 600.0
    overwrite: bool = False
    as_json: bool = False
    """Print the summary as one JSON object on stdout, its lines on stderr."""
    procs: int | None = 1
    """Workers; null: one for every core of this machine or the Ray cluster."""
    ray: str | None = None
    """Address of the Ray cluster whose machines run the workers; null: this machine does."""
    access: Access = OPEN
    """Keys, headers and TLS of every request and control call."""
    gpus: int | None = None
    """GPUs of the engine, kept in the trace's header; null: not said."""
    slos: tuple["Threshold", ...] = ()
    """Checked at the run's end."""

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
    parser.add_argument("--url", required=True, metavar="URL", help="base URL of the engine, or of a tap before it")
    parser.add_argument(
        "-o",
        "--output",
        "--out",
        type=Path,
        metavar="TRACE",
        help="the trace to write; .gz and .zst compress (default: a new name in this folder)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing trace")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object; the text on stderr")
    parser.add_argument(
        "--model", default=AUTO, metavar="NAME", help="served model's name; auto: the first of /v1/models"
    )
    parser.add_argument(
        "--dialect", choices=CHOICES, default=AUTO, help="engine whose request fields are sent; auto: ask the engine"
    )
    parser.add_argument(
        "--tokenizer",
        default=AUTO,
        metavar="PATH",
        help="tokenizer for prompts of text: a directory, engine, or none; auto: the engine's, if it has /tokenize",
    )
    parser.add_argument(
        "--extra-body",
        metavar="JSON",
        help='further fields, merged into each body, such as {"temperature": 0.7} (null removes a field); model, '
        "prompts, lengths and stream are refused",
    )
    parser.add_setting("--vocab-low", type=int, default=1000, metavar="ID", help="lowest token id to send")
    parser.add_setting("--vocab-high", type=int, default=100_000, metavar="ID", help="token ids stay below this")
    parser.add_argument("--timeout", type=duration, default="10m", help="longest time a request may take")
    parser.add_setting(
        "--session-header",
        action="append",
        metavar="NAME",
        help=f"header for the session id, for routers; may be repeated (default {SESSION_HEADER})",
    )


def add_run_arguments(parser: Parser) -> None:
    """Add the flags of access, SLOs and processes: after those of the load in the help."""
    add_access_arguments(parser, "every request and control call")
    metrics = parser.add_argument_group("metrics at the end")
    add_gpus_argument(metrics)
    add_slo_arguments(metrics)
    run = parser.add_argument_group("processes and machines")
    run.add_argument("--procs", default="1", metavar="N", help="processes that send; auto: one for every core")
    run.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run them on this Ray cluster, such as head:6379; auto: this machine's cluster",
    )


def run_settings(args: argparse.Namespace, *, stream: bool = True) -> dict[str, Any]:
    """Return the values of ``RunSettings`` that parsed flags do not have under the same name."""
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
    """Return the names of ``--session-header``, or the usual one; raises InputError for a name that none may have."""
    for name in names or ():
        if not HEADER_NAME.fullmatch(name) or name.lower() in RESERVED_HEADERS:
            raise InputError(f"--session-header: {name!r}; expected the name of a header that requests do not have yet")
    return tuple(names or (SESSION_HEADER,))


def parse_procs(text: str) -> int | None:
    if text == AUTO:
        return None
    if not text.isdecimal():
        raise InputError(f"--procs: {text!r}; expected a whole number, or {AUTO}")
    return int(text)
