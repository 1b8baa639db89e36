"""Files of ``sim curve``, ``sim misses`` and ``sim reuse --json``, read back to be drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TypeVar

import msgspec

from tracefile.records.errors import InputError

File = TypeVar("File")


class OneCurve(msgspec.Struct, frozen=True):
    """Hits by cache size at one block size."""

    block_size: int
    input_tokens: int
    sizes: list[int]
    """In blocks."""
    hit_tokens: list[float]
    hit_tokens_low: list[float] = []
    """Ends of intervals, where the curve was sampled."""
    hit_tokens_high: list[float] = []


class CurveFile(msgspec.Struct, frozen=True, tag_field="kind", tag="curve"):
    """Result of ``sim curve``."""

    trace: str
    curves: list[OneCurve]


class CauseShare(msgspec.Struct, frozen=True):
    """Prompt tokens of some requests, by cause."""

    name: str
    requests: int
    input_tokens: int
    tokens: dict[str, int]


class MissesFile(msgspec.Struct, frozen=True, tag_field="kind", tag="misses"):
    """Result of ``sim misses``."""

    trace: str
    block_size: int
    usable_blocks: int | None
    """Null: unlimited."""
    total: CauseShare
    cohorts: list[CauseShare]
    by: str | None
    groups: list[CauseShare]
    evictions: list[list[int]]


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution, at the file's levels."""

    count: int
    quantiles: list[float]


class WorkingSet(msgspec.Struct, frozen=True):
    """Blocks touched in an interval of time."""

    start_ms: float
    distinct_blocks: int
    seen_blocks: int


class ReuseFile(msgspec.Struct, frozen=True, tag_field="kind", tag="reuse"):
    """Result of ``sim reuse``."""

    trace: str
    block_size: int
    levels: list[float]
    time_ms: Quantiles
    distance_blocks: Quantiles
    window_ms: float
    windows: list[WorkingSet]


@dataclass(slots=True)
class CurveFiles:
    """Everything to draw, each with its label."""

    curves: dict[str, CurveFile] = field(default_factory=dict)
    misses: dict[str, MissesFile] = field(default_factory=dict)
    reuses: dict[str, ReuseFile] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """Each once, in the order given among files of one kind."""
        return list(dict.fromkeys([*self.curves, *self.misses, *self.reuses]))


def read_curve_files(arguments: Sequence[str]) -> CurveFiles:
    """Read ``[LABEL=]FILE`` each; the label is the trace's name if none is given. Raises InputError."""
    found = CurveFiles()
    for argument in arguments:
        given, equals, path = argument.partition("=")
        labelled = bool(equals) and "/" not in given
        file = _read(Path(path if labelled else argument))
        label = given if labelled else PurePath(file.trace).name
        if isinstance(file, CurveFile):
            _add(found.curves, label, file, argument)
        elif isinstance(file, MissesFile):
            _add(found.misses, label, file, argument)
        else:
            _add(found.reuses, label, file, argument)
    return found


def _add(files: dict[str, File], label: str, file: File, argument: str) -> None:
    if not label or label in files:
        raise InputError(
            f"{argument}: label {label!r} is given twice or empty; expected LABEL=FILE with one of its own"
        )
    files[label] = file


def _read(path: Path) -> CurveFile | MissesFile | ReuseFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CurveFile | MissesFile | ReuseFile)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a file") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; expected what sim curve, misses or reuse prints with --json") from None
