"""TTFT residuals of a fit: measured and predicted latency."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.schema import Record


@dataclass(frozen=True, slots=True)
class Requests:
    """TTFTs of a fit, with tokens that may explain an error; arrays of shape (n,)."""

    request: IntArray
    measured_ms: FloatArray
    predicted_ms: FloatArray
    censored: BoolArray
    prompt_tokens: FloatArray
    cached_tokens: FloatArray

    @property
    def uncached_tokens(self) -> FloatArray:
        return self.prompt_tokens - self.cached_tokens

    @property
    def loss(self) -> float:
        observed = ~self.censored
        ratio = np.maximum(self.measured_ms[observed], 1e-6) / np.maximum(self.predicted_ms[observed], 1e-6)
        return float(np.minimum(np.abs(np.log(ratio)), 1.0).mean()) if observed.any() else float("nan")


def requests_of(
    records: Sequence[Record], cached_tokens: Sequence[int], predicted_ms: Sequence[float | None]
) -> Requests:
    """Return a row per predicted TTFT that was measured or censored."""
    rows = [
        (index, record.ttft_ms or record.e2e_ms or 0.0, predicted, record.ttft_ms is None)
        for index, (record, predicted) in enumerate(zip(records, predicted_ms, strict=True))
        if predicted is not None and (record.ttft_ms is not None or _left(record))
    ]
    indexes = [index for index, *_ in rows]
    return Requests(
        np.array(indexes, dtype=np.int64),
        np.array([measured_ms for _, measured_ms, _, _ in rows]),
        np.array([predicted for _, _, predicted, _ in rows]),
        np.array([censored for *_, censored in rows], dtype=np.bool_),
        np.array([float(records[index].prompt_tokens or 0) for index in indexes]),
        np.array([float(cached_tokens[index]) for index in indexes]),
    )


def _left(record: Record) -> bool:
    return record.status not in {"ok", "error"} and record.e2e_ms is not None


def errors_in_sample(requests: Requests) -> dict[str, float]:
    """Return medians of the relative TTFT error and of its size; negative: predicted too early."""
    observed = ~requests.censored
    relative = requests.predicted_ms[observed] / requests.measured_ms[observed] - 1.0
    if not len(relative):
        return {}
    return {"median_abs": round(float(np.median(np.abs(relative))), 4), "bias": round(float(np.median(relative)), 4)}
