"""What the end-to-end tests share: an engine of fixed answers beside the embedded one."""

import importlib.util
import sys
from collections.abc import Iterator
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
