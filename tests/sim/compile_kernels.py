"""Compile every kernel that commands call, so that processes of a test run find the machine code on disk."""

import tempfile
from pathlib import Path

from sim.__main__ import main
from sim.latency.modelfile import default_model, save_model

TRACE = str(Path(__file__).parent / "data" / "six_requests.jsonl")

with tempfile.TemporaryDirectory() as folder:
    model = Path(folder) / "model.json"
    save_model(default_model(), model)
    for command in (
        ["run", TRACE, "--latency-model", str(model), "-o", f"{folder}/predicted.jsonl"],
        ["pool", TRACE],
        ["misses", TRACE, "--num-gpu-blocks", "100"],
        ["curve", TRACE],
    ):
        main(command)
