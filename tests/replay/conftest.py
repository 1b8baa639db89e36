"""What tests of ``replay`` share: the scripted engine of loadgen's tests, and a key of their own."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def scripted_engine() -> ModuleType:
    name = "kvtape_tests_scripted_engine"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "loadgen" / "scripted_engine.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


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
