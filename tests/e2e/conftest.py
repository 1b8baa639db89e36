"""What the end-to-end tests share: an engine of fixed answers beside the embedded one."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def canned_engine() -> Iterator[Any]:
    """A serving ``CannedEngine``."""
    name = "kvtape_tests_canned_engine"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("canned_engine.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    with sys.modules[name].CannedEngine().serving() as engine:
        yield engine


@contextlib.contextmanager
def running_tap(engine_url: str, trace: Path, *flags: str) -> Iterator[str]:
    """The address of a tap with these flags for the length of the block; it must end cleanly."""
    command = [sys.executable, "-m", "tap", "--upstream", engine_url, "--listen", "127.0.0.1:0", *flags]
    process = subprocess.Popen(
        [*command, "--trace", str(trace)],
        env=os.environ | {"KVTAPE_KEY_FILE": str(trace.with_name("key"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"listening on (http://\S+?),", process.stdout.readline())
        assert found is not None, process.communicate()[1]
        yield found[1]
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
