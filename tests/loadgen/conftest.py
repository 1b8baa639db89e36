"""What tests of ``loadgen`` share: a scripted engine over a real socket, a key of their own, a loop in virtual time."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes.scripted_engine import ScriptedEngine
from tests.loadgen import virtual_time as virtual_time_module
from tests.replay import plan_runner as plan_runner_module


@pytest.fixture(autouse=True)
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    path.write_text(bytes(range(32)).hex())
    path.chmod(0o600)
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(path))
    return path


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine().serving() as serving:
        yield serving


@pytest.fixture(scope="session")
def virtual_time() -> ModuleType:
    return virtual_time_module


@pytest.fixture(scope="session")
def plan_runner() -> ModuleType:
    """Carries plans out without a clock or a socket."""
    return plan_runner_module
