"""Notice of the first compilation, by ``sim run``, ``sim pool`` and others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sim.kernels import compiling
from sim.kernels.groupsteps import run as run_groups
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


def test_the_loop_of_several_groups_has_machine_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both loops have one source: numba names the file by module and function."""
    (tmp_path / f"loop.{run.__name__}-15.py311.nbi").touch()
    groups: Any = run_groups
    assert groups.compiled.py_func.__qualname__ == groups.__name__ != run.__name__
    compiled = SimpleNamespace(stats=SimpleNamespace(cache_path=str(tmp_path)))
    monkeypatch.setitem(vars(groups), "compiled", compiled)
    compiling.say_if_not_compiled(groups)
    assert "compiling the simulator" in capsys.readouterr().err


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
