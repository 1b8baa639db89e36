"""Tiers behind the pool, laid out for the compiled engine, and their traffic after a run."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sim.engine.deployment import Deployment
from sim.engine.loop import Engine
from sim.kernels import layout
from sim.kernels.layout import NONE, SimState, Tier
from sim.kernels.tiers import LISTS

MOST_SLOTS = 1 << 20
_NEVER = 1 << 62


def lay_out_tier(requests: int, deployment: Deployment | None, block_size: int) -> Tier:
    """Lay out empty tiers for so many requests; None: there are none."""
    state = np.zeros(1, layout.TIERS)
    state["first_loading"] = state["first_ended"] = state["last_ended"] = NONE
    blocks = np.zeros(LISTS, layout.TIER_BLOCK)
    blocks["older"] = blocks["newer"] = range(LISTS)
    counts = np.zeros(1, layout.TIER_COUNTS)
    by_place = np.zeros(1, layout.TIER_REQUEST)
    slots = 1
    if deployment is not None and deployment.host_blocks:
        _set_links(state, deployment, block_size)
        capacity = deployment.host_blocks + deployment.disk_blocks
        blocks = np.append(blocks, np.zeros(capacity, layout.TIER_BLOCK))
        slots = 1 << min(capacity, MOST_SLOTS).bit_length()
        by_place = np.zeros(requests + 1, layout.TIER_REQUEST)
        by_place["first"] = _NEVER
    return Tier(state, counts, blocks, np.zeros(slots, np.int32), by_place)


def _set_links(state: layout.Records, deployment: Deployment, block_size: int) -> None:
    values = {
        "is_on": True,
        "host_blocks": deployment.host_blocks,
        "disk_blocks": deployment.disk_blocks,
        "block_size": block_size,
        "token_ms": deployment.kv_bytes_per_token / deployment.host_gb_per_s / 1e6,
        "latency_ms": deployment.host_latency_ms,
        "disk_token_ms": deployment.kv_bytes_per_token / deployment.disk_gb_per_s / 1e6,
        "disk_latency_ms": deployment.disk_latency_ms,
    }
    for name, value in values.items():
        state[name] = value
    for name in ("read_free_ms", "write_free_ms", "disk_read_free_ms", "disk_write_free_ms"):
        state[name] = -np.inf


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Blocks and tokens that went to and from a run's tiers."""

    loads: int
    loaded_tokens: int
    stored_blocks: int
    host_blocks: int
    """In the host's memory at the end; and evicted from it."""
    host_evicted: int
    disk_read_blocks: int
    disk_stored_blocks: int
    disk_blocks: int


def traffic_in(states: list[SimState], living: list[SimState] | None = None) -> TierTraffic:
    """Return the traffic of a run's engines; ``living``: those whose memory is there at the end, else all."""
    tiers = [state.scheduler.tier for state in states]
    stores = {id(tier.counts): tier.counts[0] for tier in tiers}.values()
    ends = {id(state.scheduler.tier.counts): state.scheduler.tier.counts[0] for state in living or states}.values()
    own = {
        name: sum(int(tier.state[name][0]) for tier in tiers)
        for name in ("loads", "loaded_tokens", "stored_blocks", "disk_read_blocks", "disk_stored_blocks")
    }
    return TierTraffic(
        **own,
        host_blocks=sum(int(one["host_used"]) for one in ends),
        host_evicted=sum(int(one["host_evicted"]) for one in stores),
        disk_blocks=sum(int(one["disk_used"]) for one in ends),
    )


def traffic_of(engines: Iterable[Engine]) -> TierTraffic:
    """Return the traffic of a run's engines."""
    found = [one for engine in engines if (one := engine.scheduler.offloading) is not None]
    return TierTraffic(
        loads=sum(int(one.loads) for one in found),
        loaded_tokens=sum(int(one.loaded_tokens) for one in found),
        stored_blocks=sum(int(one.host.stored) for one in found),
        host_blocks=sum(len(one.host.blocks) for one in found),
        host_evicted=sum(int(one.host.evicted) for one in found),
        disk_read_blocks=sum(int(one.disk_read_blocks) for one in found),
        disk_stored_blocks=sum(int(one.disk.stored) for one in found),
        disk_blocks=sum(len(one.disk.blocks) for one in found),
    )


def traffic_sentence(traffic: TierTraffic) -> str:
    said = (
        f"memory behind the pool: {traffic.loaded_tokens:,} tokens loaded in {traffic.loads:,} transfers, "
        f"{traffic.stored_blocks:,} blocks stored, {traffic.host_blocks:,} kept and {traffic.host_evicted:,} evicted"
    )
    if traffic.disk_stored_blocks:
        said += f"; disk: {traffic.disk_read_blocks:,} blocks read, {traffic.disk_stored_blocks:,} written"
    return said
