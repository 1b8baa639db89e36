"""Notice of the first compilation, by ``sim run``, ``sim pool`` and others."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sim.kernels import compiling
from sim.kernels.loop import run


def test_the_first_run_says_that_it_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Kernel:
        compiled = SimpleNamespace(stats=SimpleNamespace(cache_path=str(tmp_path)))
        __name__ = run.__name__

    compiling.say_if_not_compiled(Kernel())
    assert "compiling the simulator" in capsys.readouterr().err
    (tmp_path / f"loop.{run.__name__}-15.py311.nbi").touch()
    compiling.say_if_not_compiled(Kernel())
    assert not capsys.readouterr().err


def test_machine_code_of_an_earlier_version_is_forgotten(tmp_path: Path) -> None:
    """Its index names classes that are gone: numba would fail on it instead of compiling anew."""
    index = tmp_path / "loop.run-1.nbi"
    index.touch()

    class CacheFile:
        _index_path = str(index)

        def _load_index(self) -> None:
            raise AttributeError("Can't get attribute 'Gone'")

    compiled = SimpleNamespace(
        _cache=SimpleNamespace(_cache_file=CacheFile()), stats=SimpleNamespace(cache_path=str(tmp_path))
    )
    compiling._forget_unreadable(compiled)
    assert not index.exists()
