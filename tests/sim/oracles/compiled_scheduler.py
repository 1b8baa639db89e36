"""The compiled scheduler one call at a time, for tests that look at every step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from measure.machinecode.entries import entry
from sim.engine.deployment import Deployment
from sim.engine.simstate import build_state
from sim.kernels import layout
from sim.kernels import scheduler as kernels
from sim.kernels.layout import Tier
from sim.kernels.pool import KNOWN, NONE, QUEUE
from sim.latency.modelfile import make_model
from sim.vllm.config import EngineConfig
from sim.vllm.request import Request
from sim.workload.arrivals import Arrival
from tests.sim.oracles.simulation import columns
from tracefile import Record, RequestId


@entry
def _add(scheduler: Any, place: int) -> None:
    kernels.add(scheduler, place)


@entry
def _abort(scheduler: Any, place: int) -> None:
    kernels.abort(scheduler, place)


@entry
def _schedule(scheduler: Any, slot: int) -> None:
    kernels.schedule(scheduler, slot)


@entry
def _finish(scheduler: Any, slot: int) -> None:
    kernels.finish_step(scheduler, slot)


@entry
def _take_up(scheduler: Any, place: int) -> None:
    kernels.take_up(scheduler, place)


Content = tuple[int, int]
"""A block's key, and its place in the line of those under that key."""


class CompiledScheduler:
    """Requests by their place in the given order."""

    def __init__(self, config: EngineConfig, requests: Sequence[Request], deployment: Deployment | None = None) -> None:
        arrivals = [
            Arrival(
                Record(request_id=RequestId(one.request_id), prompt_logprobs=one.prompt_logprobs or None),
                "runs",
                one.prompt_tokens,
                one.output_tokens,
                one.hashes,
                one.arrival_ms,
            )
            for one in requests
        ]
        model = make_model({"t0_ms": 1.0}, config)
        self._scheduler = build_state(columns(arrivals), config, model, deployment=deployment).scheduler
        self._scheduler.requests["arrival_ms"][:-1] = [one.arrival_ms for one in requests]
        self._preemptions = self._scheduler.requests["preemptions"].copy()

    @property
    def has_work(self) -> bool:
        queues = self._scheduler.state[0]
        return bool(queues["num_running"] + queues["num_waiting"]) or bool(self.loading)

    @property
    def tier(self) -> layout.Tier:
        return self._scheduler.tier

    @property
    def loading(self) -> list[int]:
        """Places of the requests that wait for blocks from a tier, the first to begin first."""
        return in_list(self.tier, "first_loading")[::-1]

    def loaded_blocks(self, place: int) -> int:
        request = self._scheduler.requests[place]
        return int(request["num_blocks"] - request["num_hashed"])

    def take_up(self, place: int) -> None:
        _take_up(self._scheduler, place)

    def add(self, place: int) -> None:
        _add(self._scheduler, place)

    def abort(self, place: int) -> None:
        if self._scheduler.requests["state"][place] != layout.FINISHED:
            _abort(self._scheduler, place)

    def schedule(self, slot: int) -> None:
        _schedule(self._scheduler, slot)

    def finish_step(self, slot: int) -> None:
        _finish(self._scheduler, slot)

    def shares(self, slot: int) -> list[tuple[int, int, int]]:
        """Place, tokens and depth of each share."""
        shares = self._scheduler.shares[slot, : self._scheduler.steps["count"][slot]]
        return list(zip(shares["place"].tolist(), shares["num_tokens"].tolist(), shares["depth"].tolist(), strict=True))

    def take_preempted(self) -> list[int]:
        """Places preempted since the last call."""
        now = self._scheduler.requests["preemptions"].copy()
        found: list[int] = np.flatnonzero(now != self._preemptions).tolist()
        self._preemptions = now
        return found

    def free_contents(self) -> list[Content | None]:
        """What the free blocks hold, next to be taken first; None: nothing known."""
        pool = self._scheduler.pool
        contents: list[Content | None] = [None] * int(pool.counts["num_unhashed"][0])
        copy = int(pool.copies["after"][QUEUE])
        while copy != QUEUE:
            contents += reversed(self._contents(copy))
            copy = int(pool.copies["after"][copy])
        return contents

    def holders(self) -> dict[Content, int]:
        """Of every cached block, how many hold it."""
        pool = self._scheduler.pool
        found: dict[Content, int] = {}
        for first in pool.table.tolist():
            number = first
            while number != NONE:
                copy = first_copy = int(pool.segments["copy"][number])
                while True:
                    references = int(pool.copies["references"][copy])
                    found |= {content: references for content in self._contents(copy) if content is not None}
                    copy = int(pool.copies["next_twin"][copy])
                    if copy == first_copy:
                        break
                number = int(pool.segments["next_in_slot"][number])
        return found

    def _contents(self, copy: int) -> list[Content | None]:
        """Of one copy's blocks, root first."""
        pool = self._scheduler.pool
        segment = pool.segments[pool.copies["segment"][copy]]
        kind, base, start, end, line = (int(segment[name]) for name in ("kind", "base", "start", "end", "copy"))
        assert kind == KNOWN, "the workloads' keys are all known"
        place_in_line = 0
        while line != copy:
            line, place_in_line = int(pool.copies["next_twin"][line]), place_in_line + 1
        return [(key, place_in_line) for key in pool.keys[base + start : base + end].tolist()]

    def stats(self) -> tuple[int, int, int]:
        stats = self._scheduler.stats[0]
        return int(stats["requests"]), int(stats["query_tokens"]), int(stats["hit_tokens"])


def in_list(tier: Tier, first: str) -> list[int]:
    """Return the places in a list of ``TIERS``: of requests being loaded, or of ended ones."""
    found, place = [], int(tier.state[first][0])
    while place != layout.NONE:
        found.append(place)
        place = int(tier.requests["next"][place])
    return found
