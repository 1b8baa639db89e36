"""Machine code without a folder to keep it in: each process compiles its own."""

import pytest
from numba.core import caching

from measure.cache.machinecode import kept
from sim.kernels.compiling import entry, say_if_not_compiled


def doubled(number: int) -> int:
    return 2 * number


def test_a_user_who_can_write_no_folder_compiles_in_each_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert kept(doubled)(21) == 42
    say_if_not_compiled(entry(doubled))
    assert capsys.readouterr().err == (
        "sim: compiling the simulator, in each run (about 40 s); expected a folder to keep it in, as NUMBA_CACHE_DIR "
        "names one\n"
    )
