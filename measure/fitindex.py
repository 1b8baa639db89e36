"""Index of rolling fits: a folder of models, one for each window of time, and ``windows.jsonl`` with their lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from tracefile.files.rows import read_rows, write_rows
from tracefile.records.errors import InputError

INDEX: Final = "windows.jsonl"


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A number of a window's fit and its interval of 95 %. Null ends: not known."""

    value: float
    low: float | None
    high: float | None
    unit: str = ""
    state: Literal["identified", "borrowed", "open"] = "identified"
    """``borrowed``: held at the lender's cost at this window's pace; ``open``: not identified, and nothing was lent."""


class WindowErrors(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT errors of a run without noise, as fractions; negative: predicted too early. Null: past the last event."""

    p50: float | None
    p90: float | None
    median_abs: float
    """Median over requests of |predicted − seen| / seen."""


class FittedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A window of time and its fit."""

    window: Annotated[str, msgspec.Meta(min_length=1)]
    """Name, unique in the folder: its begin in UTC, or on the trace's clock where the traces know no other."""
    begin_s: float
    """Unix time; from the trace's t = 0 where the traces know no wall clock."""
    length_s: Annotated[float, msgspec.Meta(gt=0)]
    status: Literal["fitted", "skipped"]
    reason: str | None
    """Reason of a skipped window. Null: fitted."""
    traces: list[str]
    requests: Annotated[int, msgspec.Meta(ge=0)]
    """Requests that arrived in it."""
    digest: str
    """Of the requests and of what else decides the fit: a window with the same one is not fitted again."""
    model: str | None = None
    """File of its model.json, in the folder. Null: skipped."""
    lender: str | None = None
    """Model that lent what the window does not identify, and that the pace is over. Null: skipped."""
    lender_drift_log_sd: float = 0.0
    """Standard deviation of log(speed) between the lender's captures."""
    pace: Estimate | None = None
    """Time of its steps over the lender's."""
    parameters: dict[str, Estimate] = {}
    errors: dict[str, WindowErrors] = {}
    """By model: ``before``, of the last window fitted before it; ``lender``; ``own``, its own in sample."""


def read_windows(folder: Path) -> list[FittedWindow]:
    """Read a folder's windows in order of time; raises InputError naming file, line and field."""
    path = folder / INDEX
    if not path.is_file():
        raise InputError(f"{folder}: no {INDEX} is there; expected the folder of sim fit --window 1h -o {folder}")
    windows = []
    for window, where in read_rows(path, FittedWindow, "window"):
        if window.model not in (None, Path(window.model or "").name):
            raise InputError(f"{where}: model: {window.model!r}; expected a file name in the folder")
        windows.append(window)
    return sorted(windows, key=lambda window: window.begin_s)


def write_windows(folder: Path, windows: Sequence[FittedWindow]) -> None:
    """Replace the index of a folder of windows."""
    write_rows(folder / INDEX, windows)
