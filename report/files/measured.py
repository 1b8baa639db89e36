"""A run with its metrics, as every file is made of it; and the reason why one is not."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from measure.metrics.columns import Table, parts
from measure.metrics.results import TraceMetrics
from measure.metrics.slos import Slo
from measure.runs import UNKNOWN, Run
from tracefile.records.encoding import encode_document
from tracefile.records.extras import is_lacking, lacking

if TYPE_CHECKING:  # numba, which a trace without hashes need not load
    from measure.metrics.prefixcache import CacheStudy


@dataclass(frozen=True, slots=True)
class Measured:
    """Material of the files."""

    path: Path
    """The trace."""
    run: Run
    metrics: TraceMetrics
    slos: tuple[Slo, ...]
    steps: Path | None = None
    """Steps of the simulation that predicted the trace. None: not given."""
    study: "CacheStudy | None" = None
    """Null: the trace has no block hashes, or numba is not installed."""

    @property
    def left_out(self) -> str:
        """Reason why a trace with block hashes has no study. Empty: it has one, or no hashes."""
        if self.study is not None or not is_lacking("numba") or (self.run.reusable_tokens == UNKNOWN).all():
            return ""
        return f"hits at every cache size and shared prefixes left out: {lacking('numba')}"


class Lacking(Exception):  # noqa: N818 - no error: the file is left out
    """Raised with what a file needs and the trace lacks."""


Writer = Callable[[Measured, Path], None]
"""Writes one file; raises Lacking before its first byte or behind it."""


def write_json(path: Path, told: Any) -> None:
    path.write_bytes(encode_document(told))


def write_jsonl(table: Table, path: Path) -> None:
    encoder = msgspec.json.Encoder()
    with open(path, "wb") as file:
        for part in parts(table):
            rows = zip(*part.values(), strict=True)
            file.write(encoder.encode_lines([dict(zip(part, row, strict=True)) for row in rows]))
