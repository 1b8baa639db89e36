"""How fast the engine was during a capture, whatever a forecast of it says: its own steps' time over the model's.

Each step of the captured schedule is counted as a fit would count it, and held against what the model gives it. Queues,
sessions and noise are not in this: it tells an engine that was slower or quicker than when it was calibrated from a
forecast that is wrong about what the engine had to do.
"""

from pathlib import Path

import numpy as np

from sim.model import Model
from sim.noisefit import speed
from sim.observations import observe
from sim.variants import prepare_capture, schedule_of
from sim.workload import plan_arrivals
from tracefile import load_trace


def pace(trace: Path, model: Model) -> float:
    """Middle of captured over predicted time, of steps with prefill and of those without."""
    meta, records = load_trace(trace)
    hashed = any(record.block_hashes is not None for record in records)
    arrivals = plan_arrivals(meta, records, model.engine.block_size, path=str(trace), cold_prompts=not hashed)
    capture = prepare_capture(records, arrivals, model.engine, "factual")
    frontend, parameters = model.frontend, model.vector()
    work = (frontend.f0_ms, frontend.f1_ms_per_prompt_token)
    seen = observe(capture.records, schedule_of(capture, model.engine), frontend.placement, work)
    return float(np.exp(speed(seen, parameters)))
