"""What tests of ``sim`` share (they do not import one another): the slow engine, and synthetic captures."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.fixture(scope="session")
def slow_engine() -> ModuleType:
    return load_beside("oracles/slow_engine.py")


@pytest.fixture(scope="session")
def slow_radix() -> ModuleType:
    return load_beside("oracles/slow_radix.py")


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    return load_beside("synthetic.py")


@pytest.fixture(scope="session")
def captured_loads() -> ModuleType:
    return load_beside("captured_loads.py")


@pytest.fixture(scope="session")
def planned() -> ModuleType:
    return load_beside("planned.py")
