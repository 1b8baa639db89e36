"""The tap as a command that runs: its processes by their roles, and at its end the account of every request."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.proxybench.processes import child_named, free_port, until_listening

ROOT = Path(__file__).resolve().parent.parent.parent
ROLES = {"worker": "tap.proxy.worker", "recorder": "tap.recorder.recorder"}


@dataclass(slots=True)
class RunningTap:
    """A tap from when it listens; the account is there once it has ended."""

    process: "subprocess.Popen[bytes]"
    port: int
    trace: Path
    log: Path
    account: dict[str, Any] = field(default_factory=dict)

    async def pid(self, role: str) -> int:
        """The one process of a role, waited for where it is being started again."""
        return await child_named(self.process.pid, ROLES[role])

    async def end(self) -> None:
        """Ask it to end as an operator would, and read its account."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait)
        self.account = kept_account(self.trace)


@contextlib.asynccontextmanager
async def running_tap(folder: Path, upstream: int, flags: Sequence[str]) -> AsyncIterator[RunningTap]:
    """``tap`` in front of a port until the block ends."""
    port, trace, log = free_port(), folder / "captured.jsonl", folder / "tap.log"
    command = [sys.executable, "-m", "tap", "--upstream", f"http://127.0.0.1:{upstream}"]
    command += ["--listen", f"127.0.0.1:{port}", "-o", str(trace), *flags]
    variables = {**os.environ, "KVTAPE_KEY_FILE": str(folder / "key"), "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220  once, before anything is measured
            command, cwd=ROOT, env=variables, stdout=output, stderr=output
        )
    tap = RunningTap(process, port, trace, log)
    try:
        await until_ready(tap)
        yield tap
    finally:
        await tap.end()


async def until_ready(tap: RunningTap) -> None:
    """Wait for the line that says it listens: its port takes connections before anybody answers them."""
    await until_listening(tap.port, tap.process)
    while b"listening on" not in tap.log.read_bytes():
        if tap.process.poll() is not None:
            raise RuntimeError(f"the tap did not start: {tap.log.read_text()}")
        await asyncio.sleep(0.02)


def kept_account(trace: Path) -> dict[str, Any]:
    """The counts that the tap kept beside its trace; empty if it kept none."""
    summary = Path(f"{trace}.summary.json")
    try:
        account: dict[str, Any] = json.loads(summary.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return account
