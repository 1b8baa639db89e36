"""Settings of a run that do not change its workload: access, processes, machines, progress output."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.access import OPEN, Access, add_access_arguments, read_access
from engines.recognition import CHOICES
from loadgen.core.bodyfields import add_body_arguments
from loadgen.core.request import SESSION_HEADER
from measure.metrics.flags import add_gpus_argument, add_slo_arguments, checked_gpus
from tracefile import InputError
from tracefile.commandline.durations import duration

if TYPE_CHECKING:
    from measure.metrics.slos import Slo

AUTO = "auto"
STDERR = "-"
"""For ``--json-progress``: stderr, in place of the panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """Nothing here changes what is sent, or its digest."""

    procs: int | None = 1
    """Shards; null: one for every 2 cores of this machine or the Ray cluster."""
    ray: str | None = None
    """Address of the Ray cluster whose machines run the shards; null: this machine does."""
    json_progress: str | None = None
    """File for a JSON line a second, ``-`` for stderr; null: none."""
    log_interval_s: float | None = None
    """Between progress lines; 0: none; null: 10 s, on a terminal none beside the panel."""
    resume: bool = False
    access: Access = OPEN
    """Keys, headers and TLS of every request and control call."""
    gpus: int | None = None
    """GPUs of the engine, kept in the trace's header; null: not said."""
    slos: tuple["Slo", ...] = ()
    """Checked at the run's end."""

    def __post_init__(self) -> None:
        if self.procs is not None and self.procs < 1:
            raise InputError(f"--procs: {self.procs}; expected 1 or more, or {AUTO}")
        if self.log_interval_s and self.json_progress == STDERR:
            raise InputError(f"--log-interval: with --json-progress {STDERR}; expected one of them on stderr")
        if self.ray is not None and self.resume:
            raise InputError("--resume: with --ray; expected one of them: what is to go on lies on this machine")


ONE_PROCESS = RunFlags()


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="base URL of the engine, or of a tap before it")
    parser.add_argument(
        "-o",
        "--output",
        "--out",
        type=Path,
        metavar="TRACE",
        help="the trace to write; .gz and .zst compress (default: a new name in this folder)",
    )
    parser.add_argument(
        "--model", default=AUTO, metavar="NAME", help="served model's name; auto: the first of /v1/models"
    )
    parser.add_argument(
        "--dialect", choices=CHOICES, default=AUTO, help="engine whose request fields are sent; auto: ask the engine"
    )
    parser.add_argument("--vocab-low", type=int, default=1000, metavar="ID", help="lowest token id to send")
    parser.add_argument("--vocab-high", type=int, default=100_000, metavar="ID", help="token ids stay below this")
    parser.add_argument(
        "--tokenizer",
        default=AUTO,
        metavar="PATH",
        help="tokenizer for prompts of text: a directory, engine, or none; auto: the engine's, if it has /tokenize",
    )
    parser.add_argument("--timeout", type=duration, default="10m", help="longest time a request may take")
    parser.add_argument(
        "--session-header",
        action="append",
        metavar="NAME",
        help=f"header for the session id, for routers; may be repeated (default {SESSION_HEADER})",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing trace")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object; the text on stderr")
    add_body_arguments(parser)
    add_access_arguments(parser, "every request and control call")
    judging = parser.add_argument_group("metrics at the end")
    add_gpus_argument(judging)
    add_slo_arguments(judging)
    _add_run_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("processes and machines")
    run.add_argument(
        "--procs",
        default="1",
        metavar="N",
        help="parts of the load, two processes each: one sends, one records; auto: a part for every 2 cores",
    )
    run.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run the shards on this Ray cluster, such as head:6379; auto: this machine's cluster",
    )
    run.add_argument("--json-progress", metavar="FILE", help="write progress as a JSON line a second; -: to stderr")
    run.add_argument(
        "--log-interval",
        type=duration,
        help="interval of progress lines, on a terminal too; 0: none (default 10s; on a terminal none)",
    )
    run.add_argument("--resume", action="store_true", help="continue a run that was killed, and append to its trace")


def run_flags(args: argparse.Namespace) -> RunFlags:
    from measure.metrics.slos import parse_slos  # noqa: PLC0415 - --help needs no numpy

    return RunFlags(
        procs=parse_procs(args.procs),
        ray=args.ray,
        json_progress=args.json_progress,
        log_interval_s=args.log_interval,
        resume=args.resume,
        access=read_access(args, api=args.api, url=args.url),
        gpus=checked_gpus(args.gpus),
        slos=parse_slos(args.slo, args.slo_file),
    )


def parse_procs(text: str) -> int | None:
    if text == AUTO:
        return None
    if not text.isdecimal():
        raise InputError(f"--procs: {text!r}; expected a whole number, or {AUTO}")
    return int(text)
