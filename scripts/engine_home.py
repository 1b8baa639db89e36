"""Home of a real engine on this machine: its own environment in the user's cache, its server, the tests against it.

``scripts.vllm_engine`` and its like each make an ``EngineHome``, say how to install and start the engine, and hand both
to ``act``: ``install`` once, ``serve`` until Ctrl-C, ``test`` with the tests that need it.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from scripts.processes import measuring_cores, serving

START_S = 300.0


@dataclass(frozen=True, slots=True)
class EngineHome:
    """Folder of an engine's environment and models, shared by all checkouts of this user."""

    name: str  # of the folder
    title: str  # the engine's name in messages
    has_core: bool = True
    """Its server has a core to itself, where there are several. False: all of them."""
    start_s: float = START_S
    """Longest time until it is healthy."""

    @property
    def directory(self) -> Path:
        """``~/.cache/kvtape/NAME``."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtape" / self.name

    @property
    def python(self) -> Path:
        """The Python of the engine's own environment."""
        return self.directory / "venv" / "bin" / "python"

    def is_installed(self) -> bool:
        """Return whether the environment is complete."""
        return (self.directory / "venv" / "ready").exists()

    def make_environment(self, cost: str, install_packages: Callable[[Sequence[str]], None]) -> None:
        """Create the environment and fill it by ``install_packages(pip)``; a half-made one is made again.

        uv takes an eighth of pip's time; pip alone knows an index of one's own.

        Args:
            cost: Time and space that this takes, for the message.
            install_packages: Given the words of ``pip`` in that environment, installs the engine.
        """
        venv = self.directory / "venv"
        print(f"Installing {self.title} into {venv} ({cost}, once) ...", flush=True)
        os.environ.setdefault("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))
        os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip's
        pip = [str(self.python), "-m", "pip", "--quiet"]
        try:
            self._make_empty()
            subprocess.run([*pip, "install", "uv"], check=True)
            install_packages([str(self.python), "-m", "uv", "--quiet", "pip"])
        except subprocess.CalledProcessError:
            print("uv could not install it; trying pip ...", flush=True)
            self._make_empty()
            install_packages(pip)
        (venv / "ready").touch()

    def _make_empty(self) -> None:
        venv = self.directory / "venv"
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)

    @contextlib.contextmanager
    def serving(self, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> Iterator[str]:
        """Run a server's command for the length of the ``with`` block and give its base URL; output goes to ``log``."""
        core, url = measuring_cores()[1] if self.has_core else None, f"http://127.0.0.1:{port}"
        is_ready = partial(_is_healthy, url)
        with serving(command, is_ready, log, self.title, environment=environment, core=core, start_s=self.start_s):
            yield url


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2.0).status_code == httpx.codes.OK
    return False


@dataclass(frozen=True, slots=True)
class EngineActions:
    """Functions of one engine that ``act`` calls."""

    home: EngineHome
    install: Callable[[], None]
    running: Callable[[Path, int, Sequence[str]], AbstractContextManager[str]]
    """Given the log, a port (0: any free one) and more flags of the engine: the server, with its base URL."""
    marker: str  # of the tests that need the engine
    variable: str  # environment variable with the base URL of a running one, for those tests
    tests: Sequence[str] = ()  # files of those tests; none: all that have the marker
    test_flags: Sequence[str] = ()  # of the engine, for its tests
    test_environment: Mapping[str, str] | None = None  # further variables for tests on an engine started here


def engine_parser(description: str | None, home: EngineHome) -> argparse.ArgumentParser:
    """Parser of an action with its port and log; an engine's script adds flags of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["install", "serve", "test"])
    parser.add_argument("--port", type=int, default=8000, help="where to serve")
    parser.add_argument("--log", type=Path, default=home.directory / "server.log", help="the server's output")
    return parser


def act(actions: EngineActions, args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Install, serve or test, as ``args.action`` says; ``rest`` are flags of the engine, or of pytest."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that the server is stopped too
    if args.action == "test":
        return run_tests(actions, rest)
    home = actions.home
    actions.install()
    if args.action == "install":
        print(f"{home.title} is installed: {home.python}")
        return 0
    with actions.running(args.log, args.port, rest) as url:
        print(f"{home.title} serves the model 'tiny' at {url} (log: {args.log}); Ctrl-C stops it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def run_tests(actions: EngineActions, pytest_arguments: Sequence[str]) -> int:
    """Run the engine's tests against the URL in its variable, or against a server started for them."""
    command = [sys.executable, "-m", "pytest", "-m", actions.marker, *actions.tests, *pytest_arguments]
    if actions.variable in os.environ:
        return subprocess.run(command, check=False).returncode
    actions.install()
    environment = {**os.environ, **(actions.test_environment or {})}
    print(f"Starting {actions.home.title} ...", flush=True)
    with actions.running(actions.home.directory / "test-server.log", 0, actions.test_flags) as url:
        return subprocess.run(command, env=environment | {actions.variable: url}, check=False).returncode
