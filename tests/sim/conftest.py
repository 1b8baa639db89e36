"""What tests of ``sim`` share: the published trace and synthetic captures."""

import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.sim import synthetic as synthetic_module


@pytest.fixture
def mooncake() -> Path:
    """The published conversation trace."""
    folder = os.environ.get("KVTAPE_DATA")
    if not folder:
        pytest.skip("KVTAPE_DATA does not name a folder with mooncake/conversation_trace.jsonl")
    return Path(folder) / "mooncake" / "conversation_trace.jsonl"


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    return synthetic_module
