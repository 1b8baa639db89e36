"""Compile every kernel that commands call, so that processes of a test run find the machine code on disk."""

import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from sim.__main__ import main
from sim.latency.modelfile import default_model, save_model
from sim.vllm.config import EngineConfig
from sim.vllm.request import Request
from tests.sim.oracles.compiled_scheduler import CompiledScheduler

TRACE = str(Path(__file__).parent / "data" / "six_requests.jsonl")


def take_steps() -> None:
    """Each call of the compiled scheduler that tests make one by one."""
    requests = [Request(name, 5, 1, [1], 0.0) for name in ("taken", "aborted")]
    scheduler = CompiledScheduler(EngineConfig(block_size=4, num_gpu_blocks=9), requests)
    for place in (0, 1):
        scheduler.add(place)
    scheduler.abort(1)
    scheduler.schedule(0)
    scheduler.finish_step(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor() as pool:
        model = Path(folder) / "model.json"
        save_model(default_model(), model)
        run = ["run", TRACE, "--latency-model", str(model), "-o", f"{folder}/predicted.jsonl"]
        misses = ["misses", TRACE, "--num-gpu-blocks", "100"]  # the kernels of `sim pool`, too
        fleet = [*run[:-1], f"{folder}/fleet.jsonl", "--replicas", "2"]
        commands = [pool.submit(main, command) for command in (run, misses, ["curve", TRACE], fleet)]
        pool.submit(take_steps).result()
        for command in commands:
            command.result()
