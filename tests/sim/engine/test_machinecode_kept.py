"""Machine code of the step loops on disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sim.kernels import compiling
from sim.kernels.groupsteps import run as run_groups
from sim.kernels.loop import run


def test_the_loop_of_several_groups_has_machine_code_of_its_own() -> None:
    """Both loops have one source: numba names the file by module and function."""
    groups: Any = run_groups
    assert groups.compiled.py_func.__qualname__ == groups.__name__ != run.__name__


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
