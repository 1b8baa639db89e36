"""``sim run`` says why it is quiet for a while the first time."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sim.kernels import compiling, loop
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


def test_machine_code_of_an_earlier_version_is_forgotten(tmp_path: Path) -> None:
    """Its index names classes that are gone: numba would fail on it instead of compiling anew."""
    index = tmp_path / "loop.run-1.nbi"
    index.touch()

    class CacheFile:
        _index_path = str(index)

        def _load_index(self) -> None:
            raise AttributeError("Can't get attribute 'Gone'")

    compiled = SimpleNamespace(_cache=SimpleNamespace(_cache_file=CacheFile()))
    compiling._forget_unreadable(compiled)
    assert not index.exists()
