"""The engines under study: a real vLLM or SGLang, or the embedded engine, with the settings a capture asks for."""

import contextlib
import time
from collections.abc import Iterator
from typing import Literal

import httpx
import numpy as np

from engines.control import ControlClient
from engines.facts import EngineFacts
from scripts import gpu_engine, sglang_engine, vllm_engine
from scripts.fidelity.loads import SCHEDULER, SGLANG_KV_TOKENS, SGLANG_STEP_TOKENS, EngineSettings
from scripts.job import Workspace
from scripts.proxybench.processes import free_port

EngineKind = Literal["sim", "vllm", "vllm-gpu", "sglang"]
"""The embedded engine, or a real one on this machine's CPU or GPU."""

PROBE_TOKENS = 2048
"""One step of the engine, and long enough for its clock to matter more than the network's."""
PROBES = 5


@contextlib.contextmanager
def engine(kind: EngineKind, work: Workspace, settings: EngineSettings, *flags: str) -> Iterator[str]:
    """An engine with ``flags`` of vLLM's names for the length of the ``with`` block; gives its URL."""
    shape = vllm_engine.ModelShape(settings.hidden, settings.layers)
    if kind == "sglang":
        sglang_engine.install(shape)
        print(f"\n── engine: starting SGLang (half a minute): {settings}", flush=True)
        extra = [*sglang_flags(settings), *flags]
        with sglang_engine.running_sglang(shape, work.log("engine"), extra=extra) as url:
            yield url
        return
    if kind != "sim":
        home = gpu_engine if kind == "vllm-gpu" else vllm_engine
        home.install(shape)
        print(f"\n── engine: starting vLLM (a minute or more): {settings}", flush=True)
        with home.running_vllm(shape, work.log("engine"), extra=[*vllm_flags(settings), *flags]) as url:
            yield url
        return
    address = f"127.0.0.1:{free_port()}"
    command = [
        "sim",
        "serve",
        "--listen",
        address,
        "--block-size",
        "32",
        "--num-gpu-blocks",
        str(settings.blocks or 32768),
        *SCHEDULER,
        *flags,
    ]
    if not settings.prefix_caching:
        command.append("--no-prefix-caching")
    with work.serving("engine", command, f"http://{address}") as url:
        yield url


def vllm_flags(settings: EngineSettings) -> list[str]:
    """Settings as flags of vLLM."""
    flags = [] if settings.blocks is None else ["--num-gpu-blocks-override", str(settings.blocks)]
    return flags if settings.prefix_caching else [*flags, "--no-enable-prefix-caching"]


def sglang_flags(settings: EngineSettings) -> list[str]:
    """Settings as flags of SGLang, pages of as many tokens as vLLM's blocks; a prompt is computed in one step."""
    flags = ["--page-size", str(vllm_engine.BLOCK_SIZE), "--max-total-tokens", str(SGLANG_KV_TOKENS)]
    flags += ["--max-running-requests", "32", "--chunked-prefill-size", str(SGLANG_STEP_TOKENS)]
    flags += ["--dtype", vllm_engine.fastest_dtype(), "--disable-overlap-schedule"]
    return flags if settings.prefix_caching else [*flags, "--disable-radix-cache"]


def engine_command(kind: EngineKind, settings: EngineSettings) -> str:
    """Command that starts the engine, without the parts that differ between machines."""
    if kind == "sim":
        return "sim serve"
    shape = vllm_engine.ModelShape(settings.hidden, settings.layers)
    if kind == "sglang":
        words = sglang_engine.server_command(shape, 0, sglang_flags(settings))[1:]
    else:
        home = gpu_engine if kind == "vllm-gpu" else vllm_engine
        words = home.server_command(shape, 0, vllm_flags(settings))[1:]
    return " ".join(word.replace(str(vllm_engine.HOME.directory), "~/.cache/kvtape/vllm") for word in words)


def scheduler_of(kind: EngineKind) -> tuple[str, ...]:
    """Flags of the engine's scheduler, which it does not tell."""
    return gpu_engine.SCHEDULER if kind == "vllm-gpu" else SCHEDULER


def facts(url: str) -> EngineFacts:
    """Settings and counters that a running engine tells."""
    with ControlClient(url) as control:
        return control.facts()


def preemptions(url: str) -> int:
    """Preemptions since the engine's start, by its own count; SGLang's is not there before the first."""
    return round(facts(url).gauges.get("preemptions", 0.0))


def wait_until_idle(url: str, timeout_s: float = 120.0) -> None:
    """Return once no request is left in the engine: a cache cannot be emptied while one holds blocks."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        gauges = facts(url).gauges
        if not any(gauges.get(state) for state in ("running", "waiting")):
            return
        time.sleep(0.2)


def probe(url: str, model: str, seed: int) -> list[float]:
    """TTFT of single cold prompts of one size in an idle engine, ms: the present speed of the machine."""
    tokens = np.random.default_rng(seed).integers(1000, 100_000, (PROBES, PROBE_TOKENS))
    found: list[float] = []
    with httpx.Client(base_url=url, timeout=120.0) as client:
        client.get("/health").raise_for_status()  # so that no probe pays for the connection
        for prompt in tokens.tolist():
            began = time.perf_counter()
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()
            found.append(round(1000 * (time.perf_counter() - began), 1))
    return found


def served_model(url: str) -> str:
    """The name that requests must give."""
    return str(httpx.get(f"{url}/v1/models", timeout=30.0).json()["data"][0]["id"])
