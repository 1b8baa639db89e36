"""What tests of ``replay`` share: the scripted engine of loadgen's tests, and a key of their own."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes import strict_engines as strict_engines_module
from tests.fakes.scripted_engine import ScriptedEngine
from tests.replay import plan_runner
from tests.replay import traces as traces_module


@pytest.fixture(scope="session")
def traces() -> ModuleType:
    """Small traces, written as a test says, and their replays."""
    return traces_module


@pytest.fixture(scope="session")
def runner() -> ModuleType:
    """Carries plans out without a clock or a socket."""
    return plan_runner


@pytest.fixture(scope="session")
def strict_engines() -> ModuleType:
    """Engines that refuse what the real ones do."""
    return strict_engines_module


def write_key(folder: Path) -> Path:
    """The key of all these tests."""
    path = folder / "key"
    path.write_text(bytes(range(1, 33)).hex())
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_key(tmp_path)
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(path))
    return path


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(seed=1).serving() as serving:
        yield serving


@pytest.fixture
def other_engine() -> Iterator[ScriptedEngine]:
    """Generates other tokens than ``engine``."""
    with ScriptedEngine(seed=2).serving() as serving:
        yield serving
