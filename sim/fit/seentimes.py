"""Times at which a capture saw each request's tokens: the basis of its schedule."""

import math
from collections.abc import Sequence

import numpy as np

from sim.workload.arrivals import Arrival
from tracefile.records.schema import Record

UNSEEN_MS = math.inf


class SeenTimes:
    """Times by place, on the trace's clock, ms."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        records = [arrival.record for arrival in arrivals]
        self.first_ms = [_first_ms(record) for record in records]
        """Of the first token; ``UNSEEN_MS``: it was not seen."""
        self.every_ms = [_every_ms(record) for record in records]
        """Of every token that came; those that came with later ones in a read are laid between their neighbours."""
        self.left_ms = [
            math.inf if arrival.abort_after_ms is None else arrival.arrival_ms + arrival.abort_after_ms
            for arrival in arrivals
        ]
        """When the client went away; infinity: it did not."""
        gaps_ms = [gap for record in records for gap in record.itl_ms]
        self.slack_ms = float(np.quantile(gaps_ms, 0.05)) / 2.0 if gaps_ms else 0.5
        """Half of a step as short as they get: what is less apart than this may be of one step."""

    def first_steps(self, slack_ms: float) -> dict[int, int]:
        """Return by place the step of its first token, counted over steps that have any.

        Reads up to ``slack_ms`` after one another are of one step.
        """
        seen = sorted((first_ms, place) for place, first_ms in enumerate(self.first_ms) if first_ms < UNSEEN_MS)
        steps, count, before_ms = {}, -1, -math.inf
        for first_ms, place in seen:
            count += first_ms - before_ms > slack_ms
            steps[place], before_ms = count, first_ms
        return steps

    def ends_ms(self, sampling: Sequence[tuple[int, int]], steps: int = 0) -> list[float]:
        """Return the times at which these requests got the token ``steps`` after the given one, where they did."""
        return [
            every_ms[token + steps]
            for place, token in sampling
            if 0 <= token + steps < len(every_ms := self.every_ms[place])
        ]


def seen_tokens(record: Record) -> list[float]:
    """Return the time of each token of ``record``, on the trace's clock; NaN for a token read with later ones."""
    if record.arrival_ms is None or record.ttft_ms is None:
        return []
    reads_ms = record.arrival_ms + np.cumsum([record.ttft_ms, *record.itl_ms])
    later = sum(record.itl_tokens)
    sizes = [max(1, (record.output_tokens or later + 1) - later), *record.itl_tokens]
    times: list[float] = []
    for size, read_ms in zip(sizes, reads_ms.tolist(), strict=True):
        times += [float("nan")] * (size - 1) + [read_ms] * min(size, 1)
    return times


def _first_ms(record: Record) -> float:
    if record.ttft_ms is None or record.arrival_ms is None:
        return UNSEEN_MS
    return record.arrival_ms + record.ttft_ms


def _every_ms(record: Record) -> list[float]:
    times_ms = seen_tokens(record)
    if not times_ms and record.status == "ok" and record.output_tokens and (end_ms := record.end_ms()) is not None:
        # Not streamed: all that is known of its tokens is when the last had come.
        times_ms = [math.nan] * (record.output_tokens - 1) + [end_ms]
    known = [place for place, time_ms in enumerate(times_ms) if not math.isnan(time_ms)]
    if len(known) == len(times_ms) or record.arrival_ms is None:
        return times_ms
    places, seen = [-1, *known], [record.arrival_ms, *(times_ms[place] for place in known)]
    filled: list[float] = np.interp(range(len(times_ms)), places, seen).tolist()
    return filled
