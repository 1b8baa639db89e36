"""Run a real vLLM on a GPU: this Python's vLLM with a random-weight model, without a network."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from scripts import vllm_engine
from scripts.engine_home import EngineHome
from scripts.processes import free_port
from scripts.vllm_engine import ModelShape

HOME = EngineHome("vllm-gpu", "vLLM", has_core=False, start_s=900.0)
SEQUENCES, STEP_TOKENS, CONTEXT = 256, 8192, 40960
"""Maximum requests and tokens per scheduler step; maximum tokens per request (Qwen3-8B's context)."""
SCHEDULER = ("--max-num-seqs", str(SEQUENCES), "--max-num-batched-tokens", str(STEP_TOKENS))


def install(shape: ModelShape) -> None:
    """Check that vLLM can be imported, and create the model if it is missing."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"{sys.executable} has no vllm: pass --wheels DIR with the wheels of vLLM and its dependencies")
    if not (shape.directory / "config.json").exists():
        vllm_engine.make_model(shape)


def server_command(shape: ModelShape, port: int, extra: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, *vllm_engine.serving_words(shape, port), "--dtype", "bfloat16"),
        *("--max-model-len", str(CONTEXT), *SCHEDULER, *extra),
    ]


def running_vllm(shape: ModelShape, log: Path, *, extra: Sequence[str] = ()) -> AbstractContextManager[str]:
    """Run vLLM within the ``with`` block and yield its base URL; its output goes to ``log``."""
    port = free_port()
    return HOME.serving(server_command(shape, port, extra), os.environ | vllm_engine.OFFLINE, log, port)


def describe_gpu() -> str:
    """Return name and driver of the first GPU, after a comma; empty without a GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", {lines[0].strip()}" if lines else ""
