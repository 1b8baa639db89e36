"""A process from the nursery is told from one that Python started by nothing but its parent."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.warmstart import WarmPopen, warm_children, warm_process

TRACE = str(Path(__file__).parent / "sim" / "data" / "six_requests.jsonl")
KINDS: list[Any] = [subprocess.Popen, WarmPopen]


def ended(kind: Any, *command: str, **settings: Any) -> tuple[int, str, str]:
    line = [sys.executable, "-m", *command]
    with kind(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize(
    "command", [["tracefile", "check", TRACE], ["tracefile", "check", "missing.jsonl"], ["tracefile", "--unknown"]]
)
def test_warm_start_output_and_exit_code_are_equal(command: list[str], tmp_path: Path) -> None:
    cold, warm = (ended(kind, *command, cwd=tmp_path) for kind in KINDS)
    assert warm == cold


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_warm_start_relays_signals(number: signal.Signals) -> None:
    with WarmPopen(
        [sys.executable, "-m", "sim", "serve", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_warm_start_of_coroutines() -> None:
    async def scenario() -> None:
        server = await warm_process("sim", "serve", "--listen", "127.0.0.1:0", env=os.environ)
        assert b"http://127.0.0.1:" in await server.stdout.readline()
        assert server.pid in warm_children(os.getpid(), "sim")
        assert warm_children(os.getpid(), "tap") == []
        assert server.returncode is None
        server.send_signal(signal.SIGTERM)
        assert (await server.communicate())[1] == b""
        assert await server.wait() == 0
        assert server.pid not in warm_children(os.getpid(), "sim")
        refused = await warm_process("tracefile", "--unknown", env=os.environ)
        out, err = await refused.communicate()
        assert (refused.returncode, out, err) == (
            2,
            *map(str.encode, ended(subprocess.Popen, "tracefile", "--unknown")[1:]),
        )

    asyncio.run(scenario())
