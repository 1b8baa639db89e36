"""Servers for tests over real sockets: the embedded engine as its own process, on a port of the system's choice."""

import contextlib
import fcntl
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from measure.machinecode import entries
from sim.latency.modelfile import default_model, make_model, save_model
from tests.warmstart import STARTERS, WARM, WarmPopen

# A slow machine is no finding, and CI must say the same of the same commit; a developer's run explores.
settings.register_profile("explore", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if "CI" in os.environ else "explore")

# Workers keep all cores busy: threads of linear algebra would only wait for one another, and use a core for that.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Any test may be the first that compiles, and many read stderr: tests of this notice set it anew.
entries._TOLD.append(True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three workers a core: most tests wait on sockets, processes and clocks."""
    return 3 * (os.cpu_count() or 1)


RARE = {"docs", "engines", "ray", "vllm"}
"""Markers of tests that the suite leaves out."""
KERNELS = "KVTAPE_TESTS_COMPILING"
"""Variable that names the file which is locked as long as kernels are compiled for all workers."""
WITHOUT_KERNELS = {"engines", "loadgen", "replay", "tap", "tracefile", "wire"}
WITH_KERNELS = {
    *("test_cachecurve.py", "test_hostile_files.py", "test_loadgen.py", "test_replay.py", "test_sweep.py"),
}
"""Files of these rooms that call them."""
PATIENCE = 1500
"""Looks at the lock, five a second."""
_compiling: "subprocess.Popen[bytes] | None" = None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the simulator and the tests once; on a fresh clone each worker would do so for itself.

    The workers start when the tests are compiled. The simulator takes one core for a minute: tests of other rooms run
    on the other one meanwhile.
    """
    global _compiling  # noqa: PLW0603 - one for a run
    if not getattr(session.config.option, "numprocesses", None) or hasattr(session.config, "workerinput"):
        return
    folder = Path(__file__).parent
    with tempfile.NamedTemporaryFile(delete=False) as held:
        os.environ[KERNELS] = held.name
        fcntl.flock(held, fcntl.LOCK_EX)  # the process has it as long as it runs
        command = [sys.executable, "-m", "tests.sim.compile_kernels"]
        _compiling = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder.parent,
            pass_fds=[held.fileno()],
        )
    if not (folder / "wire" / "__pycache__").exists():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the kernels, where a test may want them; its own time begins afterwards."""
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    if KERNELS in os.environ and (room not in WITHOUT_KERNELS or item.path.name in WITH_KERNELS):
        with open(os.environ.pop(KERNELS), "rb") as held:
            for _ in range(PATIENCE):  # then each process compiles for itself
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                time.sleep(0.2)
    return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run, after its own summary, if the kernels could not be compiled; each process tried for itself then."""
    if _compiling is not None:
        code = _compiling.wait()
        Path(os.environ.pop(KERNELS)).unlink()
        if code:
            session.exitstatus = session.exitstatus or pytest.ExitCode.INTERNAL_ERROR
            print("kernels were not compiled: see python -m tests.sim.compile_kernels", file=sys.stderr)


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
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found, f"sim serve did not start: {server.stderr.read()}"
        yield found.group()
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
