"""What the end-to-end tests share: an engine of fixed answers beside the embedded one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.canned_engine import CannedEngine
from tests.warmstart import WarmPopen


@pytest.fixture
def canned_engine() -> Iterator[CannedEngine]:
    with CannedEngine().serving() as engine:
        yield engine


@contextlib.contextmanager
def running_tap(engine_url: str, trace: Path, *flags: str) -> Iterator[str]:
    """The address of a tap with these flags for the length of the block; it must end cleanly."""
    command = [sys.executable, "-m", "tap", "--upstream", engine_url, "--listen", "127.0.0.1:0", *flags]
    process = WarmPopen(
        [*command, "-o", str(trace)],
        env=os.environ | {"KVTAPE_KEY_FILE": str(trace.with_name("key"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        result = re.search(r"listening on (http://\S+?),", process.stdout.readline())
        assert result is not None, process.communicate()[1]
        yield result[1]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()


RunTap = Callable[..., contextlib.AbstractContextManager[str]]


@pytest.fixture
def run_tap() -> RunTap:
    """``running_tap``."""
    return running_tap
