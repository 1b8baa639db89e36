"""Official client libraries, imported by the first test that uses one.

Each takes a second or more of CPU; as imports of a test module they would cost each worker that collects it.
"""

from typing import Any

import pytest


def client_library(name: str) -> Any:
    """Return the module; the test is skipped where it is not installed."""
    return pytest.importorskip(name, reason="the `clients` extra is not installed")
