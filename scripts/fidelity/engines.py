"""The engines under study: a real vLLM, or the embedded engine in its place, with the settings a capture asks for."""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Literal

import httpx
import numpy as np

from engines.facts import PAGES, read_facts
from scripts import gpu_engine, vllm_engine
from scripts.fidelity.loads import SCHEDULER, EngineSettings
from scripts.job import Workspace
from scripts.proxybench.processes import free_port
from tracefile.records.schema import Engine

EngineKind = Literal["sim", "vllm", "vllm-gpu"]
"""The embedded engine, or a real one on this machine's CPU or GPU."""

PROBE_TOKENS = 2048
"""One step of the engine, and long enough for its clock to matter more than the network's."""
PROBES = 5
_COUNTS = r"^vllm:{name}\{{[^}}]*\}} (\S+)$"


@contextlib.contextmanager
def engine(kind: EngineKind, work: Workspace, settings: EngineSettings, *flags: str) -> Iterator[str]:
    """An engine with ``flags`` of vLLM's names for the length of the ``with`` block; gives its URL."""
    if kind != "sim":
        home = gpu_engine if kind == "vllm-gpu" else vllm_engine
        shape = vllm_engine.ModelShape(settings.hidden, settings.layers)
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


def engine_command(kind: EngineKind, settings: EngineSettings) -> str:
    """Command that starts the engine, without the parts that differ between machines."""
    if kind == "sim":
        return "sim serve"
    home = gpu_engine if kind == "vllm-gpu" else vllm_engine
    words = home.server_command(vllm_engine.ModelShape(settings.hidden, settings.layers), 0, vllm_flags(settings))[1:]
    return " ".join(word.replace(str(vllm_engine.HOME.directory), "~/.cache/kvtape/vllm") for word in words)


def scheduler_of(kind: EngineKind) -> tuple[str, ...]:
    """Flags of the engine's scheduler, which it does not tell."""
    return gpu_engine.SCHEDULER if kind == "vllm-gpu" else SCHEDULER


def facts(url: str) -> Engine:
    """Settings that a running engine tells."""
    return read_facts(*(httpx.get(f"{url}{page}", timeout=30.0).text for page in PAGES)).engine


def version(url: str) -> str:
    """The engine's version, as it says."""
    return str(httpx.get(f"{url}/version", timeout=30.0).json().get("version", "unknown"))


def count(url: str, name: str) -> int:
    """Value of a metric of the engine, summed over its labels."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    return round(sum(float(value) for value in re.findall(_COUNTS.format(name=name), text, re.MULTILINE)))


def wait_until_idle(url: str, timeout_s: float = 120.0) -> None:
    """Return once no request is left in the engine: a cache cannot be emptied while one holds blocks."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(count(url, f"num_requests_{state}") for state in ("running", "waiting")):
            return
        time.sleep(0.2)


def empty_cache(url: str) -> None:
    """Forget every prefix."""
    wait_until_idle(url)
    httpx.post(f"{url}/reset_prefix_cache", timeout=30.0).raise_for_status()


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
