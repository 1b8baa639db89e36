"""Machine code of functions: kept on disk where there is a folder, and a notice when a process makes some."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from numba.core import caching, config, event

from measure.cache import machinecode
from measure.cache.machinecode import kept
from sim.kernels.compiling import entry, kernel

ONCE = "kvtape: compiling machine code, once for this installation (up to 20 s) …\n"


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    machinecode._tell_of_compiling.cache_clear()
    listening = event._registered[machinecode.COMPILING]
    before, listening[:] = list(listening), []
    yield
    listening[:] = before


def doubled(number: int) -> int:
    return 2 * number


def tripled(number: int) -> int:
    return 3 * number


def test_a_user_who_can_write_no_folder_compiles_in_each_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert kept(doubled)(21) == 42
    assert capsys.readouterr().err == (
        "kvtape: compiling machine code, in each run (up to 20 s); expected a folder to keep it in, as "
        "NUMBA_CACHE_DIR names one\n"
    )


@pytest.mark.parametrize("kind", [kept, entry])
def test_the_first_function_that_is_compiled_is_told_and_one_read_from_disk_is_not(
    kind: Callable[[Callable[[int], int]], Callable[[int], int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The simulator's loop is no special case: a curve's functions are told as well."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    first, second = kind(doubled), kind(tripled)
    assert not capsys.readouterr().err
    assert (first(21), second(1)) == (42, 3)
    assert capsys.readouterr().err == ONCE
    machinecode._tell_of_compiling.cache_clear()
    assert kind(doubled)(21) == 42
    assert not capsys.readouterr().err


@kernel
def total(one: int, other: int) -> int:
    return one + other


def test_a_kernel_is_compiled_once_into_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each literal number that a caller has, and not for itself."""
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])

    @entry
    def twice(number: int) -> int:
        return total(total(number, 2), total(number, number))

    called: Any = total
    assert twice(3) == 11
    [made] = called.compiled.overloads.values()
    assert not made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
