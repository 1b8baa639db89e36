"""A request on its way to an engine as an object, for the plain engine and its fleets."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sim.vllm.request import ANY_HITS
from sim.workload.arrivals import NOBODY, Arrivals
from sim.workload.chain import FIRST_PRIVATE
from tracefile.records.schema import Record


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request as the engine's clients send it."""

    record: Record
    kind: Literal["runs", "as_recorded"]
    """``as_recorded``: it failed before the engine got it, and is copied; ``runs``: the engine gets it."""
    prompt_tokens: int
    output_tokens: int
    """Tokens that it generates unless its client aborts it."""
    hashes: list[int]
    """Keys of every block that gets full (see ``sim.workload.chain``)."""
    arrival_ms: float
    """As recorded; the end of its parent decides instead where there is one."""
    parent: int | None = None
    """Position of the request whose end it waits for. None: it arrives at ``arrival_ms``."""
    think_ms: float = 0.0
    """From the parent's end to its arrival."""
    abort_after_ms: float | None = None
    """Time after its arrival at which the client or a timeout aborts it. None: never."""

    hit_limit: int = ANY_HITS
    """Blocks that may hit at most; 0: its prompt is looked up in no prefix cache."""


def objects(arrivals: Arrivals) -> list[Arrival]:
    """Make an object per request; unknown blocks get private keys."""
    private = FIRST_PRIVATE
    hashes, at = arrivals.hashes.tolist(), 0
    result = []
    for position, record in enumerate(arrivals.records(np.arange(len(arrivals)))):
        hashed, private_blocks = (
            int(arrivals.hashed_blocks[position]),
            int(arrivals.full_blocks[position] - arrivals.hashed_blocks[position]),
        )
        parent, abort_after_ms = int(arrivals.parents[position]), float(arrivals.abort_after_ms[position])
        result.append(
            Arrival(
                record,
                "runs" if arrivals.runs[position] else "as_recorded",
                int(arrivals.prompt_tokens[position]),
                int(arrivals.output_tokens[position]),
                hashes[at : at + hashed] + list(range(private, private - private_blocks, -1)),
                float(arrivals.arrival_ms[position]),
                None if parent == NOBODY else parent,
                0.0 if parent == NOBODY else float(arrivals.think_ms[position]),
                None if np.isnan(abort_after_ms) else abort_after_ms,
                0 if arrivals.prompt_logprobs[position] else ANY_HITS,
            )
        )
        at, private = at + hashed, private - private_blocks
    return result
