"""Where a capture and a simulation of it meet: every TTFT and gap that was seen, and what the simulation says it is
made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from sim.engine import Flight, Simulation
from sim.features import FRONTEND_TERMS, STEP_TERMS, TERMS
from sim.latency import FrontendPlacement
from sim.timeline import Floats, Timeline
from tracefile.schema import Record

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Observations:
    """n intervals. The model's prediction of interval i is ``counts[i] @ parameters``."""

    seen_ms: Floats
    """What the trace says; shape (n,)."""
    counts: Floats
    """Terms in the order of ``TERMS``; shape (n, terms)."""
    is_ttft: Bools
    """A TTFT; else a gap between reads."""
    censored: Bools
    """The client left after ``seen_ms`` without a first token."""
    request: Ints
    """Which request, numbered over all captures."""
    session: Ints
    """Which session, numbered over all captures."""

    def select(self, kept: Bools) -> "Observations":
        """Those where ``kept``."""
        return Observations(
            self.seen_ms[kept],
            self.counts[kept],
            self.is_ttft[kept],
            self.censored[kept],
            self.request[kept],
            self.session[kept],
        )

    @classmethod
    def join(cls, parts: Sequence[Self], sizes: Sequence[int]) -> Self:
        """All captures' observations; requests numbered on from the ``sizes`` of the captures before."""
        requests = np.cumsum([0, *sizes])
        sessions = np.cumsum([0, *(part.session.max(initial=-1) + 1 for part in parts)])
        return cls(
            np.concatenate([part.seen_ms for part in parts]),
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.is_ttft for part in parts]),
            np.concatenate([part.censored for part in parts]),
            np.concatenate([part.request + first for part, first in zip(parts, requests, strict=False)]),
            np.concatenate([part.session + first for part, first in zip(parts, sessions, strict=False)]),
        )


def seen_tokens(record: Record) -> list[float]:
    """When each token of ``record`` was seen, on the trace's clock; NaN for one that came in a read with later ones."""
    if record.arrival_ms is None or record.ttft_ms is None:
        return []
    reads_ms = record.arrival_ms + np.cumsum([record.ttft_ms, *record.itl_ms])
    later = sum(record.itl_tokens)
    sizes = [max(1, (record.output_tokens or later + 1) - later), *record.itl_tokens]
    times: list[float] = []
    for size, read_ms in zip(sizes, reads_ms.tolist(), strict=True):
        times += [float("nan")] * (size - 1) + [read_ms] * min(size, 1)
    return times


def observe(records: Sequence[Record], simulation: Simulation, *, placement: FrontendPlacement) -> Observations:
    """Pair what was seen of ``records`` with the steps of their ``simulation``; requests are numbered by place."""
    cumulative = simulation.timeline.cumulative(len(TERMS))
    waits = _waits(simulation, cumulative, placement)
    sessions: dict[str, int] = {}
    seen: list[Floats] = []
    counts: list[Floats] = []
    kinds: list[tuple[int, bool, int, int, int]] = []
    for place, (record, flight) in enumerate(zip(records, simulation.flights, strict=True)):
        reads = _last_tokens(record, len(flight.token_steps))
        if record.ttft_ms is None and (record.status in {"ok", "error"} or record.e2e_ms is None):
            continue
        if not len(reads) or flight.entry_ms is None:
            continue
        session = sessions.setdefault(record.session_id or record.request_id, len(sessions))
        after = cumulative[np.asarray(flight.token_steps)[reads] + 1]
        first = after[0] + waits[place]
        censored = record.ttft_ms is None
        seen.append(np.array([record.e2e_ms if record.ttft_ms is None else record.ttft_ms]))
        counts.append(first[None, :])
        kinds.append((1, True, int(censored), place, session))
        gaps = len(reads) - 1
        if gaps > 0 and not censored:
            seen.append(np.asarray(record.itl_ms[:gaps]))
            counts.append(np.diff(after, axis=0))
            kinds.append((gaps, False, 0, place, session))
    return _assemble(seen, counts, kinds)


def _assemble(seen: list[Floats], counts: list[Floats], kinds: list[tuple[int, bool, int, int, int]]) -> Observations:
    repeats = [kind[0] for kind in kinds]
    columns = [np.repeat([kind[field] for kind in kinds], repeats) for field in range(1, 5)]
    every = np.concatenate(counts) if counts else np.zeros((0, len(TERMS)))
    # A gap without a token of its own (a read's count the trace got wrong) is made of nothing: leave it out.
    kept = every[:, 0] > 0.0
    return Observations(
        (np.concatenate(seen) if seen else np.zeros(0))[kept],
        every[kept],
        columns[0].astype(np.bool_)[kept],
        columns[1].astype(np.bool_)[kept],
        columns[2].astype(np.int64)[kept],
        columns[3].astype(np.int64)[kept],
    )


def _waits(simulation: Simulation, cumulative: Floats, placement: FrontendPlacement) -> Floats:
    """Per flight: what a TTFT has beside the steps up to its first token. Less those that ran before the request
    entered, plus the front end's terms before that; on a shared core, both are in the rows since its arrival."""
    flights, timeline = simulation.flights, simulation.timeline
    arrivals = np.array([flight.arrival_ms for flight in flights])
    if not len(timeline):
        return np.zeros((len(flights), len(TERMS)))
    if placement == "shared_core":
        return -timeline.cumulative_at(arrivals, cumulative)
    entries = np.array([flight.arrival_ms if flight.entry_ms is None else flight.entry_ms for flight in flights])
    waits = -timeline.cumulative_at(entries, cumulative)
    own = np.array([(1.0, float(flight.arrival.prompt_tokens)) for flight in flights]).reshape(-1, 2)
    waits[:, len(STEP_TERMS) :] = own if placement == "parallel" else _serial(flights, entries, own)
    return waits


def _serial(flights: Sequence[Flight], entries: Floats, own: Floats) -> Floats:
    """What a front end that takes one request at a time did from each arrival to its entry."""
    jobs = Timeline()
    free_ms = float("-inf")
    for place in np.argsort(entries, kind="stable"):
        arrival_ms, entry_ms = flights[place].arrival_ms, float(entries[place])
        if entry_ms > arrival_ms:
            jobs.append(max(arrival_ms, free_ms), entry_ms, tuple(own[place]))
            free_ms = entry_ms
    cumulative = jobs.cumulative(len(FRONTEND_TERMS))
    arrivals = np.array([flight.arrival_ms for flight in flights])
    return jobs.cumulative_at(entries, cumulative) - jobs.cumulative_at(arrivals, cumulative)


def _last_tokens(record: Record, simulated: int) -> Ints:
    """Per read, the place of its last token in the output, as far as the simulation got."""
    later = sum(record.itl_tokens)
    first = max(1, (record.output_tokens or later + 1) - later)
    places = np.cumsum([first, *record.itl_tokens]) - 1
    return np.asarray(places[places < simulated], dtype=np.int64)
