"""Compile every kernel that commands call, so that processes of a test run find the machine code on disk."""

import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from sim.__main__ import main
from sim.latency.modelfile import default_model, save_model

TRACE = str(Path(__file__).parent / "data" / "six_requests.jsonl")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor() as pool:
        model = Path(folder) / "model.json"
        save_model(default_model(), model)
        run = ["run", TRACE, "--latency-model", str(model), "-o", f"{folder}/predicted.jsonl"]
        misses = ["misses", TRACE, "--num-gpu-blocks", "100"]
        list(pool.map(main, [run, misses, ["pool", TRACE], ["curve", TRACE]]))
