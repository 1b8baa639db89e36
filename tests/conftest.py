"""Servers for tests over real sockets: the embedded engine as its own process, on a port of the system's choice."""

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from sim.latency.modelfile import default_model, make_model, save_model
from tests.warmstart import STARTERS, WARM, WarmPopen

# A slow machine is no finding, and CI must say the same of the same commit; a developer's run explores.
settings.register_profile("explore", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if "CI" in os.environ else "explore")

# Workers keep all cores busy: threads of linear algebra would only wait for one another, and use a core for that.
os.environ["OPENBLAS_NUM_THREADS"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three workers a core: most tests wait on sockets, processes and clocks."""
    return 3 * (os.cpu_count() or 1)


RARE = {"docs", "engines", "ray", "vllm"}
"""Markers of tests that the suite leaves out."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the tests to bytecode once; on a fresh clone each worker would do so for itself."""
    if not getattr(session.config.option, "numprocesses", None) or hasattr(session.config, "workerinput"):
        return
    if not (Path(__file__).parent / "wire" / "__pycache__").exists():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


@pytest.fixture(scope="session", autouse=True)
def warm_children() -> Iterator[None]:
    """Child processes of what runs in this process are forked with their modules: see ``tests.warmstart``."""
    with pytest.MonkeyPatch.context() as patch:
        for name in STARTERS:
            patch.setattr(f"{name}.subprocess", WARM)
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test of the one marker asked for, as by ``-m ray``: all of them take 5 s of CPU."""
    marker = config.option.markexpr
    if marker not in RARE or not collection_path.match("test_*.py"):
        return None
    return f"mark.{marker}" not in collection_path.read_text("utf-8") or None


def pytest_collection() -> None:
    """Collect the tests without looking for garbage: there is none yet, among millions of objects that stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later look for garbage."""
    gc.freeze()
    gc.enable()


StartSimServer = Callable[..., contextlib.AbstractContextManager[str]]


def engine_model(folder: Path, **costs: float) -> Path:
    """Write a model.json of the built-in engine with some other costs; return its path."""
    model = default_model()
    path = folder / "engine.json"
    save_model(make_model({**model.cost_by_name, **costs}, model.engine), path)
    return path


@contextlib.contextmanager
def running_sim_server(*flags: str) -> Iterator[str]:
    """``sim serve`` with ``flags`` for the length of the ``with`` block; gives its base URL, checks its end."""
    command = [sys.executable, "-m", "sim", "serve", "--listen", "127.0.0.1:0", *flags]
    server = WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        result = re.search(r"http://\S+", server.stdout.readline())
        assert result, f"sim serve did not start: {server.stderr.read()}"
        yield result.group()
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            _, complaints = server.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            _, complaints = server.communicate()
    assert server.returncode == 0, complaints
    assert complaints == ""


@pytest.fixture(scope="session")
def start_sim_server() -> StartSimServer:
    """Starts embedded engines with settings of the test's own: ``with start_sim_server("--speed", "max") as url``."""
    return running_sim_server


@pytest.fixture(scope="session")
def sim_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of an embedded engine in real time: 16-token blocks, 4,096 of them, a few milliseconds a step."""
    model = engine_model(tmp_path_factory.mktemp("engine"), t0_ms=2, per_decode_ms=0.1, frontend_base_ms=1)
    with running_sim_server("--latency-model", str(model), "--block-size", "16", "--num-gpu-blocks", "4096") as url:
        yield url


@pytest.fixture
def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A cluster of two workers on this machine; its address."""
    ray = pytest.importorskip("ray")
    context = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield str(context.address_info["gcs_address"])
    ray.shutdown()
