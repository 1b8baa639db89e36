"""What tests of ``replay`` share: the scripted engine of loadgen's tests, and a key of their own."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load_file(path: Path) -> ModuleType:
    name = f"kvtape_tests_{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def scripted_engine() -> ModuleType:
    return load_file(Path(__file__).parents[1] / "loadgen" / "scripted_engine.py")


@pytest.fixture(scope="session")
def traces() -> ModuleType:
    """Small traces, written as a test says, and their replays."""
    return load_file(Path(__file__).with_name("traces.py"))


@pytest.fixture(scope="session")
def runner() -> ModuleType:
    """Carries plans out without a clock or a socket."""
    return load_file(Path(__file__).with_name("plan_runner.py"))


@pytest.fixture(scope="session")
def strict_engines() -> ModuleType:
    """Engines that refuse what the real ones do."""
    return load_file(Path(__file__).with_name("strict_engines.py"))


@pytest.fixture(autouse=True)
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    path.write_text("cd" * 32)
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(path))
    return path


@pytest.fixture
def engine() -> Iterator[Any]:
    with scripted_engine().ScriptedEngine(seed=1).serving() as serving:
        yield serving


@pytest.fixture
def other_engine() -> Iterator[Any]:
    """Generates other tokens than ``engine``."""
    with scripted_engine().ScriptedEngine(seed=2).serving() as serving:
        yield serving
