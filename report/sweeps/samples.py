"""Material of a run's intervals: its sessions, the values to resample, and the draws from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from measure.metrics.requests import interactivity_tps, known
from measure.metrics.sessions import measure_sessions, session_order
from measure.resampling import busy_units, effective_units, resample
from measure.runs import Run
from measure.survival import make_waits
from tracefile.records.arrays import FloatArray, IntArray

NOWHERE: Final[IntArray] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Sample:
    """Values by request and by session; NaN: not known."""

    sessions: list[str]
    session_of_row: IntArray
    ttft_ms: FloatArray
    interactivity_tps: FloatArray
    latency_ms: FloatArray
    """By session, of completed ones."""
    tokens: FloatArray
    """Output tokens of completed requests, by session."""
    span_ms: FloatArray
    """By session, from its first arrival to its last end, however it ended."""
    busy_periods: float
    """Effective number of periods without an idle moment, by the sessions that began in each."""


def sample_of(run: Run) -> Sample:
    order, found = session_order(run), measure_sessions(run)
    numbers = np.repeat(np.arange(len(order)), np.diff(np.append(order.starts, len(run))))
    of_row = np.empty(len(run), np.int64)
    of_row[order.rows] = numbers
    firsts = order.rows[order.starts]
    wait_ms = np.where(np.isnan(run.ttft_ms), run.e2e_ms, run.ttft_ms)
    return Sample(
        sessions=[run.sessions[row] or run.request_ids[row] for row in firsts],
        session_of_row=of_row,
        ttft_ms=run.ttft_ms,
        interactivity_tps=interactivity_tps(run),
        latency_ms=np.where(found.completed, found.latency_ms, np.nan),
        tokens=order.total(np.where(run.ok, known(run.output_tokens), 0.0)[order.rows]),
        span_ms=np.nan_to_num(found.latency_ms),
        busy_periods=effective_units(busy_units(run.arrival_ms, wait_ms, of_row)),
    )


QUANTILES: Final[Mapping[str, tuple[str, tuple[float, ...]]]] = {
    "ttft_ms": ("ttft_p50_ms ttft_p90_ms", (0.5, 0.9)),
    "interactivity_tps": ("interactivity_tps", (0.5,)),
    "latency_ms": ("session_latency_p90_ms", (0.9,)),
}
"""By field of a sample: the metrics that are its quantiles, and their levels."""
RATIOS: Final = ("throughput_tps", "ttft_p50_ms", "ttft_p90_ms", "interactivity_tps", "session_latency_p90_ms")
"""Metrics that labels are compared by."""


def draws_of(sample: Sample, unit_of_session: IntArray, weights: npt.NDArray[np.uint16]) -> dict[str, FloatArray]:
    """Return each metric of RATIOS in every draw, throughput as a share of the run's; NaN: a draw has none of it.

    ``unit_of_session``: the column of ``weights`` that counts each session. In a closed loop a session in place of
    another takes the slot for its own time, so throughput is tokens over time in slots.
    """
    found = {
        name: values
        for field, (names, levels) in QUANTILES.items()
        for name, values in zip(
            names.split(), _quantiles(sample, field, unit_of_session, weights, levels), strict=False
        )
    }
    whole = np.stack([sample.tokens, sample.span_ms], 1)
    sums = np.array([row[unit_of_session] @ whole for row in weights])  # a draw at a time: a matrix would be gigabytes
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.divide(*sums.reshape(-1, 2).T) / np.divide(*whole.sum(0))
    return {"throughput_tps": share, **found}


def _quantiles(
    sample: Sample, field: str, units: IntArray, weights: npt.NDArray[np.uint16], levels: Sequence[float]
) -> list[FloatArray]:
    values: FloatArray = getattr(sample, field)
    rows = np.flatnonzero(~np.isnan(values))
    if not len(rows) or not len(weights):
        return []
    unit_of_row = units if field == "latency_ms" else units[sample.session_of_row]
    no_end: Any = np.zeros(len(rows), np.int8)
    waits = make_waits(values[rows], no_end, rows)
    drawn = resample(waits, unit_of_row, weights, np.array(levels), NOWHERE)
    return list(drawn.quantiles_ms.T)
