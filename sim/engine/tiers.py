"""KV cache offloading traffic of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from sim.engine.loop import Engine


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """KV cache blocks and tokens moved to and from host memory in a run."""

    loads: int
    loaded_tokens: int
    stored_blocks: int
    host_blocks: int
    """Blocks in host memory at the end."""
    host_evicted: int


def traffic_of(engines: Sequence[Engine], living: Sequence[Engine] | None = None) -> TierTraffic:
    """Return the offloading traffic of a run. ``living``: engines with host memory at the end; None: all engines."""
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
        f"host memory: {traffic.loaded_tokens:,} tokens loaded in {traffic.loads:,} transfers, "
        f"{traffic.stored_blocks:,} blocks stored, {traffic.host_blocks:,} kept, {traffic.host_evicted:,} evicted"
    )
