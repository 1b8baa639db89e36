"""No kernel reads or writes beyond an array, whatever the load, and however small the arrays begin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.within_bounds import LOADS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("loads", LOADS)
def test_every_index_is_within_its_array(loads: str) -> None:
    """In a process of its own, whose code is compiled with checks; other code has none."""
    if loads == "published_loads" and "KVTAPE_DATA" not in os.environ:
        pytest.skip("KVTAPE_DATA does not name a folder with mooncake/conversation_trace.jsonl")
    checked = subprocess.run(
        [sys.executable, "-m", "tests.sim.within_bounds", loads],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert checked.returncode == 0, checked.stderr
