"""Index of a load sweep: ``sweep.jsonl`` in its folder, with a line per run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from tracefile.records.decoding import convert_object, parse_object
from tracefile.records.errors import InputError
from tracefile.storage.durable import replace_durably
from tracefile.storage.lines import LineReader

INDEX: Final = "sweep.jsonl"

RunStatus = Literal["done", "failed", "cut"]
Word = Annotated[str, msgspec.Meta(min_length=1)]


class SweepRun(msgspec.Struct, frozen=True, kw_only=True):
    """Run of a load sweep at a concurrency or request rate."""

    run: Word
    """Name, unique in the folder: ``A-p8-r1``."""
    label: Word
    """Engine or setting that was measured."""
    parallel: Annotated[int, msgspec.Meta(ge=1)] | None
    """Concurrency limit of this point. Null: the points differ by rate."""
    rate: Annotated[float, msgspec.Meta(gt=0)] | None
    """Arrivals a second of this point. Null: the points differ by concurrency."""
    repeat: Annotated[int, msgspec.Meta(ge=1)]
    """1, 2, …"""
    trace: Word
    """Trace file, relative to the folder; may be missing after a failed or cut run."""
    status: RunStatus
    """``cut``: started and not ended, such as a killed run."""
    reason: str | None
    """Reason of a failed or cut run. Null: done."""
    command: str
    """Command line of this run alone."""
    started: str
    """RFC 3339."""
    duration_s: Annotated[float, msgspec.Meta(ge=0)]
    """Time from the first send to the last end."""


def read_sweep(folder: Path) -> list[SweepRun]:
    """Read the runs of a sweep, in order of their starts. Raises InputError naming file, line and field."""
    path = folder / INDEX
    if not path.is_file():
        raise InputError(f"{folder}: no {INDEX} is there; expected the folder of a sweep (loadgen sweep -o {folder})")
    runs: dict[str, SweepRun] = {}
    with LineReader(path) as lines:
        for line in lines:
            where = f"{path}:{lines.number}"
            run = _checked(convert_object(parse_object(line, where), SweepRun, where), where)
            if run.run in runs:
                raise InputError(f"{where}: run: {run.run!r} twice; expected unique names")
            runs[run.run] = run
    return list(runs.values())


def _checked(run: SweepRun, where: str) -> SweepRun:
    if (run.parallel is None) == (run.rate is None):
        raise InputError(f"{where}: parallel, rate: {run.parallel}, {run.rate}; expected a number in one of them")
    if run.trace != Path(run.trace).name:
        raise InputError(f"{where}: trace: {run.trace!r}; expected a file name in the folder")
    return run


def write_sweep(folder: Path, runs: Sequence[SweepRun]) -> None:
    """Write the index of a sweep's folder."""
    path = folder / INDEX
    try:
        replace_durably(path, b"".join(msgspec.json.encode(run) + b"\n" for run in runs))
    except OSError as error:
        raise InputError(f"{path}: cannot write ({error.strerror or error}); expected a writable folder") from error
