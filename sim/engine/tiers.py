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
    found = [one for engine in engines if (one := engine.scheduler.offloading) is not None]
    kept = [one for engine in living or engines if (one := engine.scheduler.offloading) is not None]
    return TierTraffic(
        loads=sum(int(one.loads) for one in found),
        loaded_tokens=sum(int(one.loaded_tokens) for one in found),
        stored_blocks=sum(int(one.host.stored) for one in found),
        host_blocks=sum(len(one.host.blocks) for one in kept),
        host_evicted=sum(int(one.host.evicted) for one in found),
    )


def traffic_sentence(traffic: TierTraffic) -> str:
    return (
        f"memory behind the pool: {traffic.loaded_tokens:,} tokens loaded in {traffic.loads:,} transfers, "
        f"{traffic.stored_blocks:,} blocks stored, {traffic.host_blocks:,} kept and {traffic.host_evicted:,} evicted"
    )
