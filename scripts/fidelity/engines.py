"""Engines of a round: a real vLLM or SGLang, or the embedded engine."""

import contextlib
from collections.abc import Iterator
from typing import Literal

from engines.control import ControlClient
from engines.facts import EngineFacts
from scripts import gpu_engine, sglang_engine, vllm_engine
from scripts.fidelity.loads import SCHEDULER
from scripts.job import Workspace
from scripts.processes import free_port

EngineKind = Literal["vllm", "vllm-gpu", "sglang", "sim"]
"""A real engine on this machine's CPU or GPU, or the embedded engine."""
SGLANG_KV_TOKENS, SGLANG_STEP_TOKENS = 200_000, 8192
SGLANG_FLAGS = (
    *("--page-size", str(vllm_engine.BLOCK_SIZE), "--max-total-tokens", str(SGLANG_KV_TOKENS)),
    *("--max-running-requests", "32", "--chunked-prefill-size", str(SGLANG_STEP_TOKENS)),
    *("--dtype", vllm_engine.fastest_dtype(), "--disable-overlap-schedule"),
)
"""Pages of the size of vLLM's blocks; a prompt is computed in one step."""


def scheduler_of(kind: EngineKind) -> tuple[str, ...]:
    """Return the flags of ``sim`` for scheduler settings that the engine does not report."""
    if kind == "sglang":
        step = ("--max-num-seqs", "32", "--max-num-batched-tokens", str(SGLANG_STEP_TOKENS))
        return (*step, "--num-gpu-blocks", str(SGLANG_KV_TOKENS // 32 + 1), "--no-async-scheduling")
    return gpu_engine.SCHEDULER if kind == "vllm-gpu" else SCHEDULER


@contextlib.contextmanager
def engine(kind: EngineKind, work: Workspace, hidden: int, layers: int, *, prefix_caching: bool) -> Iterator[str]:
    """Run an engine with a model of ``hidden`` × ``layers`` within the ``with`` block and yield its URL."""
    print(f"\n── engine: starting {kind} (a minute or more), prefix caching {prefix_caching}", flush=True)
    shape = vllm_engine.ModelShape(hidden, layers)
    if kind == "sim":
        address = f"127.0.0.1:{free_port()}"
        size = ("--block-size", "32", "--num-gpu-blocks", "32768")
        off = () if prefix_caching else ("--no-prefix-caching",)
        with work.serving(
            "engine", ["sim", "serve", "--listen", address, *size, *SCHEDULER, *off], f"http://{address}"
        ) as url:
            yield url
    elif kind == "sglang":
        sglang_engine.install(shape)
        extra = [*SGLANG_FLAGS, *(() if prefix_caching else ("--disable-radix-cache",))]
        with sglang_engine.running_sglang(shape, work.log("engine"), extra=extra) as url:
            yield url
    else:
        home = gpu_engine if kind == "vllm-gpu" else vllm_engine
        home.install(shape)
        extra = [] if prefix_caching else ["--no-enable-prefix-caching"]
        with home.running_vllm(shape, work.log("engine"), extra=extra) as url:
            yield url


def facts(url: str) -> EngineFacts:
    with ControlClient(url) as control:
        return control.facts()
