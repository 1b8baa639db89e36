"""Traffic of the memory behind the pools after a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from sim.engine.loop import Engine


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Blocks and tokens that went to and from a run's host memory."""

    loads: int
    loaded_tokens: int
    stored_blocks: int
    host_blocks: int
    """In the host's memory at the end; and evicted from it."""
    host_evicted: int


def traffic_of(engines: Sequence[Engine], living: Sequence[Engine] | None = None) -> TierTraffic:
    """Return the traffic of a run's engines; ``living``: those whose memory is there at the end, else all."""
    tiers = [tier for engine in engines if (tier := engine.scheduler.offloading) is not None]
    resident = [tier for engine in living or engines if (tier := engine.scheduler.offloading) is not None]
    return TierTraffic(
        loads=sum(int(tier.loads) for tier in tiers),
        loaded_tokens=sum(int(tier.loaded_tokens) for tier in tiers),
        stored_blocks=sum(int(tier.host.stored) for tier in tiers),
        host_blocks=sum(len(tier.host.blocks) for tier in resident),
        host_evicted=sum(int(tier.host.evicted) for tier in tiers),
    )


def traffic_sentence(traffic: TierTraffic) -> str:
    return (
        f"memory behind the pool: {traffic.loaded_tokens:,} tokens loaded in {traffic.loads:,} transfers, "
        f"{traffic.stored_blocks:,} blocks stored, {traffic.host_blocks:,} kept and {traffic.host_evicted:,} evicted"
    )
