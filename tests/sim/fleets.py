"""Small fleets for tests."""

from collections.abc import Callable
from typing import Any

from engines.routing.router import Router
from sim.engine.dispatch import Dispatch, RoutedLoad, Timeline
from sim.engine.fleet import Fleet, FleetEngine
from sim.latency.modelfile import make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile import BlockHash, Record, RequestId

CONFIG = EngineConfig(block_size=4, num_gpu_blocks=400, max_num_seqs=8, max_num_batched_tokens=64)
COSTS = {"t0_ms": 4.0, "per_prefill_token_ms": 0.1, "per_decode_ms": 1.0, "frontend_base_ms": 1.0}


def make_request(
    number: int, *, arrival_ms: float = 0.0, prompt: int, output: int, parent: int | None = None
) -> Record:
    """Return a request whose blocks no other has; with a parent it comes 5 ms after that one's end."""
    return Record(
        request_id=RequestId(f"r{number}"),
        arrival_ms=arrival_ms,
        prompt_tokens=prompt,
        output_tokens=output,
        block_hashes=[BlockHash(1000 * number + block) for block in range(prompt // 4)],
        parent_id=None if parent is None else RequestId(f"r{parent}"),
        think_ms=None if parent is None else 5.0,
    )


def routed(
    arrivals: Arrivals,
    engines: int,
    policy: Callable[..., Any],
    events: Timeline | None = None,
    *,
    keeps_steps: bool = False,
) -> Dispatch:
    """Run requests through a fleet of equal engines."""
    names = [str(place) for place in range(engines)]
    model = make_model(COSTS, CONFIG)
    fleet = Fleet(
        arrivals, [FleetEngine(name, CONFIG, model) for name in names], None, moves=1, keeps_steps=keeps_steps
    )
    dispatch = Dispatch(fleet, RoutedLoad(arrivals, 4), Router(names, policy), incidents=events)
    dispatch.run()
    return dispatch
