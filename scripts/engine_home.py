"""A real engine on this machine: its environment in the user's cache, its server, its tests.

``scripts.vllm_engine`` and similar scripts create an ``EngineHome``, define how to install and start the engine, and
call ``act``: ``install``, ``serve`` until Ctrl-C, or ``test`` with the tests of the engine.
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
    """Folder with an engine's environment and models, shared by all checkouts of a user."""

    name: str  # name of the folder
    title: str  # the engine's name in messages
    has_core: bool = True
    """The server runs on its own core if there are several. False: on all cores."""
    start_s: float = START_S
    """Timeout of the start, in s."""

    @property
    def directory(self) -> Path:
        """``~/.cache/kvtape/NAME``."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtape" / self.name

    @property
    def python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    def is_installed(self) -> bool:
        return (self.directory / "venv" / "ready").exists()

    def make_environment(self, cost: str, install_packages: Callable[[Sequence[str]], None]) -> None:
        """Create the environment and run ``install_packages(pip)``; an incomplete environment is replaced.

        uv takes an eighth of pip's time; only pip reads a configured index.

        Args:
            cost: Time and disk space, for the message.
            install_packages: Installs the engine with the given ``pip`` command.
        """
        venv = self.directory / "venv"
        print(f"Installing {self.title} into {venv} ({cost}, once) ...", flush=True)
        os.environ.setdefault("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))
        os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip
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
        """Run a server within the ``with`` block and yield its base URL; output goes to ``log``."""
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
    """Functions of an engine for ``act``."""

    home: EngineHome
    install: Callable[[], None]
    running: Callable[[Path, int, Sequence[str]], AbstractContextManager[str]]
    """Runs the server, from the log, a port (0: any free port) and more flags; yields its base URL."""
    marker: str  # pytest marker of the engine's tests
    variable: str  # environment variable with the base URL of a running engine
    tests: Sequence[str] = ()  # test files; empty: all tests with the marker
    test_flags: Sequence[str] = ()  # flags of the engine in tests
    test_environment: Mapping[str, str] | None = None  # further variables for the tests


def engine_parser(description: str | None, home: EngineHome) -> argparse.ArgumentParser:
    """Return the parser of action, port and log; an engine's script adds more flags."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["install", "serve", "test"])
    parser.add_argument("--port", type=int, default=8000, help="port of the server")
    parser.add_argument("--log", type=Path, default=home.directory / "server.log", help="the server's output")
    return parser


def act(actions: EngineActions, args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Install, serve or test, by ``args.action``; ``extra``: flags of the engine, or of pytest."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that the server is stopped too
    if args.action == "test":
        return run_tests(actions, extra)
    home = actions.home
    actions.install()
    if args.action == "install":
        print(f"{home.title} is installed: {home.python}")
        return 0
    with actions.running(args.log, args.port, extra) as url:
        print(f"{home.title} serves the model 'tiny' at {url} (log: {args.log}); Ctrl-C stops it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def run_tests(actions: EngineActions, pytest_arguments: Sequence[str]) -> int:
    """Run the engine's tests against the URL in its variable, or against a new server."""
    command = [sys.executable, "-m", "pytest", "-m", actions.marker, *actions.tests, *pytest_arguments]
    if actions.variable in os.environ:
        return subprocess.run(command, check=False).returncode
    actions.install()
    environment = {**os.environ, **(actions.test_environment or {})}
    print(f"Starting {actions.home.title} ...", flush=True)
    with actions.running(actions.home.directory / "test-server.log", 0, actions.test_flags) as url:
        return subprocess.run(command, env=environment | {actions.variable: url}, check=False).returncode
