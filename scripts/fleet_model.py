"""Write the model.json of docs/fleet.md's questions: an engine of no make, which an hour of chat keeps a fifth busy.

python -m scripts.fleet_model model.json
"""

import argparse
from pathlib import Path

from scripts.bench_sim import COSTS, SPREAD
from sim.latency.modelfile import make_model, save_model
from sim.latency.noise import LEVELS, Noise
from sim.vllm.config import EngineConfig


def main() -> None:
    """Write the file, of costs as in ``scripts.bench_sim``."""
    parser = argparse.ArgumentParser(description="Latency model of docs/fleet.md.")
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    config = EngineConfig(num_gpu_blocks=10_001, block_size=512, max_num_seqs=256, max_num_batched_tokens=8192)
    noise = Noise(
        step_ms=(10.0,),
        step_log_ratio=(SPREAD,),
        autocorrelated_share=0.3,
        correlation_time_ms=1000.0,
        frontend_log_ratio=(0.0,) * len(LEVELS),
    )
    save_model(make_model(COSTS, config, noise), arguments.model)


if __name__ == "__main__":
    main()
