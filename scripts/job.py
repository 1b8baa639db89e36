"""Stages of a job: capture, replay, fit, predict, report; for the demo and the fidelity rounds.

Every stage is a command of kvtape in a separate process, printed as a user would type it. Its output goes to a log; a
failed stage prints the end of the log.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engines.control import ControlClient
from engines.detection import find_dialect
from engines.dialect import Dialect
from loadgen.sweeping import wait_until_idle
from scripts.processes import is_listening, serving, tail
from tracefile.records.errors import InputError

Command = Sequence[str | Path]
"""A kvtape command and its arguments."""

RESET_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Workspace:
    """Folder of a job's traces, logs and page."""

    directory: Path

    def empty_cache(self, url: str) -> None:
        """Reset the prefix cache of an idle engine; exits if the reset fails."""
        try:
            with ControlClient(url) as control:
                control.resolve_model("auto")
                wait_until_idle(control)
                _reset(control, find_dialect(control, "auto").dialect)
        except InputError as error:
            sys.exit(f"error: {error}")

    def path(self, name: str) -> Path:
        return self.directory / name

    def run(self, stage: str, command: Command, *, accept: Sequence[int] = (0,), stdout: Path | None = None) -> str:
        """Run a command and return its log; exit with the end of the log if it fails.

        ``stdout``: a file for stdout, such as the object of ``--json``; the log then has only stderr.
        """
        print(f"\n── {stage}\n   $ {shown(command)}", flush=True)
        started = time.monotonic()
        log = self.log(stage)
        with (
            log.open("wb") as output,
            contextlib.nullcontext(output) if stdout is None else stdout.open("wb") as printed,
        ):
            result = subprocess.run(module_command(command), stdout=printed, stderr=output, check=False)
        if result.returncode not in accept:
            sys.exit(f"{stage} failed with status {result.returncode}; the end of {log}:\n{tail(log)}")
        print(f"   done in {time.monotonic() - started:.0f} s", flush=True)
        return log.read_text(errors="replace")

    @contextlib.contextmanager
    def serving(self, stage: str, command: Command, url: str) -> Iterator[str]:
        """Run a server within the ``with`` block, after it accepts connections at ``url``."""
        print(f"\n── {stage}\n   $ {shown(command)} &", flush=True)
        log, address = self.log(stage), urlsplit(url)
        host, port = address.hostname or "", address.port or 80
        with serving(module_command(command), lambda: is_listening(port, host), log, stage) as server:
            yield url
        if server.returncode != 0:
            sys.exit(f"{stage} ended with status {server.returncode}; the end of {log}:\n{tail(log)}")

    def log(self, stage: str) -> Path:
        path = self.directory / "logs" / f"{stage.replace(' ', '-')}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _reset(control: ControlClient, dialect: Dialect) -> None:
    deadline = time.monotonic() + RESET_TIMEOUT_S
    if dialect.reset_cache is None:
        raise InputError(f"--url: {control.url}: {dialect.name} has no cache reset; expected an engine with one")
    while True:
        try:
            return dialect.reset_cache(control)
        except InputError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def module_command(command: Command) -> list[str]:
    """Return ``python -m tap ...`` for ``tap ...``, independent of PATH."""
    return [sys.executable, "-m", *map(str, command)]


def shown(command: Command) -> str:
    """Return a command as text, with paths relative to the working folder."""
    prefix = f"{Path.cwd()}{os.sep}"
    return " ".join(str(word).replace(prefix, "") for word in command)
