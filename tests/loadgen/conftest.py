"""What tests of ``loadgen`` share: a scripted engine over a real socket, a key of their own, a loop in virtual time."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load_beside(file: str) -> ModuleType:
    name = f"kvtape_tests_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(autouse=True)
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    path.write_text("ab" * 32)
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(path))
    return path


@pytest.fixture
def engine() -> Iterator[Any]:
    with load_beside("scripted_engine.py").ScriptedEngine().serving() as serving:
        yield serving


@pytest.fixture(scope="session")
def virtual_time() -> ModuleType:
    return load_beside("virtual_time.py")


@pytest.fixture(scope="session")
def plan_runner() -> ModuleType:
    """Carries plans out without a clock or a socket."""
    return load_beside("../replay/plan_runner.py")


@pytest.fixture(scope="session")
def vocabularies() -> ModuleType:
    return load_beside("vocabularies.py")
