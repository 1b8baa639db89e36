"""Plan of ``loadgen sweep``: its flags, its runs, and their order."""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from loadgen.loadflags import add_load_arguments, parse_config
from loadgen.plan.config import LoadConfig
from tracefile.commandline.parser import Parser
from tracefile.records.errors import InputError

PROG: Final = "loadgen sweep"
DESCRIPTION: Final = (
    "Run a load at several concurrencies or rates, on one or more engines, into a folder of traces. Accepts the other "
    "flags of loadgen."
)
EPILOG: Final = """\
Order: A B, B A, A B …, so that drift affects all labels. Each run starts after a warm-up, with an idle engine and an
empty prefix cache; without a cache reset, every run sends different tokens. The same command again executes the
missing runs. Exit status: 0 done; 1 a run failed or missed an SLO; 2 bad input; 130 interrupted by Ctrl-C or SIGTERM.

examples:
  loadgen sweep --url http://localhost:8000 --parallel 8,16,24 --number 200 -o nightly && report show nightly
"""
LABEL: Final = re.compile(r"[A-Za-z0-9][\w./-]*")
"""``/`` separates workloads: ``chat/A``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Run of a sweep, before its start."""

    name: str
    label: str
    parallel: int | None
    """Null: ``rate`` is the point."""
    rate: float | None
    repeat: int
    argv: tuple[str, ...]
    """Flags of ``loadgen``."""
    config: LoadConfig

    @property
    def point(self) -> float:
        return self.rate or self.parallel or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Settings of a sweep: folder, runs, warm-up."""

    folder: Path
    runs: tuple[PlannedRun, ...]
    """In order of execution."""
    warm_up: int
    """Requests before each run."""
    command: str
    """Command line that continues the sweep."""

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def shares_engine(self) -> bool:
        """True if two labels send to one URL and share its prefix cache."""
        urls = {run.label: run.config.url.rstrip("/") for run in self.runs}
        return len(set(urls.values())) < len(urls)


def parse_sweep(argv: Sequence[str]) -> SweepPlan:
    """Return the plan. Raises InputError for a flag of the sweep or of a run."""
    parser = sweep_parser()
    argv = parser.configured(list(argv))  # all runs get the flags that the file has now
    args = parser.parse_args(argv)
    variants = _variants(args.variant) or {_label_of(args.output): []}
    parallels, rates = _points("--parallel", args.parallel, int), _points("--rate", args.rate, float)
    if len(parallels) > 1 and len(rates) > 1:
        raise InputError("--parallel, --rate: several values of both; expected several values of one")
    if not parallels and not rates:
        raise InputError("--parallel, --rate: missing; expected points such as --parallel 8,16,24 or --rate 0.5,1,2")
    for flag, number, least in (("--repeat", args.repeat, 1), ("--warm-up", args.warm_up, 0)):
        if number < least:
            raise InputError(f"{flag}: {number}; expected {least} or more")
    by_rate = bool(rates) and len(parallels) <= 1
    words = _without_sweep_flags(argv)
    for flag, other in (("--json", "report show DIR --json"), ("--overwrite", "another folder, or its removal")):
        if flag in words:
            raise InputError(f"{flag}: not for a sweep; expected {other}")
    words += ["--parallel", str(parallels[0])] if by_rate and parallels else []
    words += ["--rate", f"{rates[0]:.12g}"] if rates and not by_rate else []
    points = rates if by_rate else parallels
    runs = [
        _planned(args.output, label, point, repeat, [*words, *variants[label]], by_rate=by_rate)
        for label, point, repeat in in_order(list(variants), points, args.repeat)
    ]
    if any(run.config.pattern == "calibration" for run in runs):
        raise InputError("--pattern: calibration, which sets the concurrency; expected another pattern")
    command = shlex.join([*PROG.split(), *argv])
    return SweepPlan(folder=args.output, runs=tuple(runs), warm_up=args.warm_up, command=command)


def in_order(labels: Sequence[str], points: Sequence[float], repeats: int) -> Iterator[tuple[str, float, int]]:
    """Yield label, point and repeat of each run: A B, B A, A B …; a point's order reverses at each repeat."""
    for repeat in range(1, repeats + 1):
        for number, point in enumerate(points):
            for label in reversed(labels) if (number + repeat) % 2 == 0 else labels:
                yield label, point, repeat


def sweep_parser() -> Parser:
    parser = Parser(prog=PROG, description=DESCRIPTION, epilog=EPILOG)
    add_load_arguments(parser)
    parser.hide_flags()  # they are flags of loadgen
    target = parser.add_argument_group("target")
    target.add_argument("--url", metavar="URL", help="base URL of the engine; or one in each --variant")
    _add_sweep_flags(parser)
    return parser


def _add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sweep").add_argument
    add("--parallel", metavar="P,P,…", help="limits of requests in flight, such as 8,16,24")
    add("--rate", metavar="R,R,…", help="sessions a second, such as 0.5,1,2")
    add(
        "--variant",
        action="append",
        default=[],
        metavar="'LABEL: FLAGS'",
        help="label of runs, and their loadgen flags, such as 'A: --url http://a:8000'; repeatable",
    )
    add("--repeat", type=int, default=1, help="runs of each label at each point")
    add("--warm-up", type=int, default=8, metavar="N", help="requests before each run; 0: none")
    output: dict[str, Any] = {"type": Path, "default": Path("sweep"), "metavar": "DIR"}
    add("-o", "--output", "--out", **output, help="folder of the runs and of their index, sweep.jsonl")


def _without_sweep_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of each run, without the flags of the sweep."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_sweep_flags(parser)
    return parser.parse_known_args(list(argv))[1]


def _points(flag: str, text: str | None, kind: type[int] | type[float]) -> list[Any]:
    if text is None:
        return []
    try:
        points = [kind(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"{flag}: {text!r}; expected numbers with commas, such as 8,16,24") from None
    if len(set(points)) < len(points):
        raise InputError(f"{flag}: {text!r}; expected each number once; repeat with --repeat N")
    return points


def _variants(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags of each label. Raises InputError."""
    variants: dict[str, list[str]] = {}
    for text in texts:
        label, colon, flags = text.partition(":")
        label, expected = label.strip(), "expected 'LABEL: FLAGS', such as 'A: --url http://a:8000'"
        if not colon or not LABEL.fullmatch(label):
            raise InputError(f"--variant: {text!r}; {expected}")
        try:
            words = shlex.split(flags)
        except ValueError as error:
            raise InputError(f"--variant: {text!r}: {error}; {expected}") from None
        if (load_words := _without_sweep_flags(words)) != words:
            word = next(word for word in words if word not in load_words)
            raise InputError(f"--variant {label}: {word}; expected it outside of --variant, for all labels")
        if (other := next((earlier for earlier in variants if _stem(earlier) == _stem(label)), None)) is not None:
            raise InputError(f"--variant {label}: same file name as {other}; expected different labels")
        variants[label] = words
    return variants


def _stem(label: str) -> str:
    """Return a label for file names."""
    return label.replace("/", "-")


def _label_of(folder: Path) -> str:
    """Label of runs without a variant: the valid part of their folder's name."""
    match = LABEL.search(folder.resolve().name)
    return match[0] if match else "runs"


def _planned(folder: Path, label: str, point: float, repeat: int, words: Sequence[str], *, by_rate: bool) -> PlannedRun:
    number = f"{point:.12g}"
    name = f"{_stem(label)}-{'rate' if by_rate else 'p'}{number}-r{repeat}"
    argv = [*words, "--rate" if by_rate else "--parallel", number, "-o", str(folder / f"{name}.jsonl.zst")]
    return PlannedRun(
        name=name,
        label=label,
        parallel=None if by_rate else int(point),
        rate=point if by_rate else None,
        repeat=repeat,
        argv=tuple(argv),
        config=replace(parse_config(argv, PROG), overwrite=True),
    )
