"""Small fleets for tests."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.routing.router import Router
from sim.engine.dispatch import Dispatch, Timeline
from sim.engine.fleets import FleetEngine, FleetLoad, routed_requests
from sim.engine.simulatedrequest import SimulatedRequest
from sim.latency.modelfile import make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile.records.schema import BlockHash, Record, RequestId

CONFIG = EngineConfig(block_size=4, num_gpu_blocks=400, max_num_seqs=8, max_num_batched_tokens=64)
COSTS = {"t0_ms": 4.0, "per_prefill_token_ms": 0.1, "per_decode_ms": 1.0, "frontend_base_ms": 1.0}


def make_request(
    number: int, *, arrival_ms: float = 0.0, prompt: int, output: int, parent: int | None = None
) -> Record:
    """Return a request with unique blocks; with a parent it arrives 5 ms after the parent's end."""
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
) -> FleetLoad:
    """Run requests through a fleet of equal engines."""
    names = [str(engine) for engine in range(engines)]
    model = make_model(COSTS, CONFIG)
    load = FleetLoad(arrivals, [FleetEngine(name, CONFIG, model) for name in names], None)
    load.dispatch = Dispatch(load.fleet, routed_requests(arrivals, 4), Router(names, policy), timeline=events)
    load.dispatch.run()
    return load


RUN_FIELDS = ("outcome", "num_delivered", "arrival_ms", "entry_ms", "admitted_ms", "ttft_ms", "e2e_ms")


def runs_of(requests: Sequence[SimulatedRequest]) -> dict[str, npt.NDArray[Any]]:
    """Return results of requests as columns."""
    return {name: np.array([getattr(request, name) for request in requests]) for name in RUN_FIELDS}
