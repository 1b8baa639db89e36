"""``sim run`` says why it is quiet for a while the first time."""

from pathlib import Path

import pytest

from sim.kernels import loop
from sim.kernels.loop import run


def test_it_is_known_whether_the_kernels_were_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stats:
        cache_path = str(tmp_path)

    class Kernel:
        stats = Stats()
        __name__ = run.__name__

    monkeypatch.setattr(loop, "run", Kernel())
    assert not loop.is_compiled()
    (tmp_path / f"loop.{run.__name__}-15.py311.nbi").touch()
    assert loop.is_compiled()
