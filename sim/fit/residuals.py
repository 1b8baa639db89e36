"""Residuals of a fit's TTFTs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.schema import Record


@dataclass(frozen=True, slots=True)
class Requests:
    """The TTFTs of a fit, with what may explain an error; all of shape (n,)."""

    request: IntArray
    seen_ms: FloatArray
    predicted_ms: FloatArray
    censored: BoolArray
    prompt_tokens: FloatArray
    cached_tokens: FloatArray

    @property
    def uncached_tokens(self) -> FloatArray:
        return self.prompt_tokens - self.cached_tokens

    @property
    def loss(self) -> float:
        """Mean of min(|log(seen / predicted)|, 1); NaN: none was seen."""
        known = ~self.censored
        ratio = np.maximum(self.seen_ms[known], 1e-6) / np.maximum(self.predicted_ms[known], 1e-6)
        return float(np.minimum(np.abs(np.log(ratio)), 1.0).mean()) if known.any() else float("nan")


def requests_of(
    records: Sequence[Record], cached_tokens: Sequence[int], predicted_ms: Sequence[float | None]
) -> Requests:
    """Return a row per TTFT that was predicted, and seen or censored."""
    rows = [
        (place, record.ttft_ms or record.e2e_ms or 0.0, predicted, record.ttft_ms is None)
        for place, (record, predicted) in enumerate(zip(records, predicted_ms, strict=True))
        if predicted is not None and (record.ttft_ms is not None or _left(record))
    ]
    places = [place for place, *_ in rows]
    return Requests(
        np.array(places, dtype=np.int64),
        np.array([seen_ms for _, seen_ms, _, _ in rows]),
        np.array([predicted for _, _, predicted, _ in rows]),
        np.array([censored for *_, censored in rows], dtype=np.bool_),
        np.array([float(records[place].prompt_tokens or 0) for place in places]),
        np.array([float(cached_tokens[place]) for place in places]),
    )


def _left(record: Record) -> bool:
    return record.status not in {"ok", "error"} and record.e2e_ms is not None


def errors_in_sample(requests: Requests) -> dict[str, float]:
    """Medians of (predicted − seen) / seen and of its size; negative: predicted too early."""
    known = ~requests.censored
    relative = requests.predicted_ms[known] / requests.seen_ms[known] - 1.0
    if not len(relative):
        return {}
    return {"median_abs": round(float(np.median(np.abs(relative))), 4), "bias": round(float(np.median(relative)), 4)}
