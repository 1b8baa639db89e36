"""Traffic of the memory behind the pool, and the bandwidth from which it is faster than computing."""

from collections.abc import Sequence

import numpy as np

from engines.routing.costs import prefill_ms
from report.pages.whatif import TiersSaid
from sim.engine.dispatch import costs_of
from sim.engine.tiers import TierTraffic
from sim.forecast.scenarios import Load
from sim.forecast.summary import span_of
from sim.latency.modelfile import Model
from tracefile.records.arrays import FloatArray


def tiers_said(load: Load, traffic: TierTraffic | None, members: Sequence[Model]) -> TiersSaid | None:
    """Return what a load's run moved to and from the host's memory; None: it has none."""
    if traffic is None or load.deployment.tiers is None:
        return None
    block_gb = load.deployment.kv_bytes_per_token * load.engine.block_size / 1e9
    mean = traffic.loaded_tokens / traffic.loads if traffic.loads else 0.0
    return TiersSaid(
        loads=traffic.loads,
        loaded_tokens=traffic.loaded_tokens,
        read_gb=round(traffic.loaded_tokens * load.deployment.kv_bytes_per_token / 1e9, 4),
        written_gb=round(traffic.stored_blocks * block_gb, 4),
        kept_blocks=traffic.host_blocks,
        evicted_blocks=traffic.host_evicted,
        mean_load_tokens=round(mean, 1),
        break_even_gb_per_s=span_of(break_even_gb_per_s(load, members, mean), None) if mean else None,
    )


def break_even_gb_per_s(load: Load, members: Sequence[Model], tokens: float) -> FloatArray:
    """Return each member's bandwidth at which a transfer of ``tokens`` takes as long as computing them from a prompt's
    start, without the steps' constants; infinite: its latency alone takes longer."""
    deployment = load.deployment
    computing_ms = np.array([prefill_ms(costs_of(deployment.model(one), load.engine), tokens, 0.0) for one in members])
    left_ms = np.maximum(computing_ms - deployment.host_latency_ms, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(tokens * deployment.kv_bytes_per_token / 1e6 / left_ms)
