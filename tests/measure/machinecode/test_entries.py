"""Entries: machine code kept on disk where there is a folder, and called without numba."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from llvmlite import binding

from measure.machinecode import entries, files, linking, loading
from measure.machinecode.digests import digest_of
from measure.machinecode.entries import entry
from measure.machinecode.kernels import kernel

ONCE = "kvtape: compiling machine code for the first run of this kind (up to 20 s) …\n"
OFFSET = 10


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep code in a folder of the test's own, in what stands for a new process."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(entries, "_TOLD", [])
    monkeypatch.setattr(entries, "TOLD_AFTER_S", 0.0)
    return tmp_path


def doubled(number: int) -> int:
    return 2 * number


def tripled(number: int) -> int:
    return 3 * number


@kernel
def total(one: int, other: int) -> int:
    return one + other


@kernel
def difference(one: int, other: int) -> int:
    return one - other


def kept_in(folder: Path) -> Path:
    [path] = folder.rglob("*.kvo")
    return path


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by each function that is compiled from now on."""
    found: list[str] = []
    compile_entry = linking.compile_entry

    def noted(called: Any, kinds: Any) -> files.MachineCode:
        found.append(called.__name__)
        return compile_entry(called, kinds)

    monkeypatch.setattr(linking, "compile_entry", noted)
    return found


def test_a_user_who_can_write_no_folder_compiles_in_each_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "_can_write", lambda folder: False)
    made = compilations(monkeypatch)
    assert (entry(doubled)(21), entry(doubled)(21)) == (42, 42)
    assert made == ["doubled", "doubled"]
    assert capsys.readouterr().err == (
        "kvtape: compiling machine code in each run (up to 20 s); expected a folder to keep it in, as "
        "NUMBA_CACHE_DIR names one\n"
    )


def test_the_first_function_that_is_compiled_is_told_and_one_read_from_disk_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = entry(doubled), entry(tripled)
    assert not capsys.readouterr().err
    assert (first(21), second(1)) == (42, 3)
    assert capsys.readouterr().err == ONCE
    monkeypatch.setattr(entries, "_TOLD", [])
    assert entry(doubled)(21) == 42
    assert not capsys.readouterr().err


def test_processes_that_need_the_same_code_make_it_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One looked before the other had made it, and waited for the lock: it reads, and tells of nothing."""
    assert entry(doubled)(21) == 42
    assert capsys.readouterr().err == ONCE
    monkeypatch.setattr(entries, "_TOLD", [])
    monkeypatch.setattr(files, "find", lambda place, digest: None)
    made = compilations(monkeypatch)
    assert entry(doubled)(21) == 42
    assert (made, capsys.readouterr().err) == ([], "")
    assert not list(folder.rglob("*.lock"))


def of_group(own: Path) -> None:
    own.chmod(0o775)


def of_all(own: Path) -> None:
    own.chmod(0o1777)


def linked(own: Path) -> None:
    own.rename(own.with_name("another"))
    own.symlink_to("another")


@pytest.mark.parametrize("opened", [of_group, of_all, linked])
def test_a_folder_that_others_can_write_is_neither_read_nor_written(
    opened: Callable[[Path], None], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that another user has made in a shared NUMBA_CACHE_DIR, before this one could."""
    monkeypatch.setattr(files.Place, "_beside", Path(os.devnull, "__pycache__"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = os.umask(0)
    try:
        assert entry(doubled)(21) == 42
        path = kept_in(folder)
        opened(path.parent)
        path.write_bytes(b"another user's")
        made = compilations(monkeypatch)
        assert entry(doubled)(21) == 42
    finally:
        os.umask(before)
    assert made == ["doubled"]
    assert path.read_bytes() == b"another user's"
    assert entry(doubled)(21) == 42  # of the user's own folder
    assert made == ["doubled"]
    assert len(list((tmp_path / "home").rglob("*.kvo"))) == 1


def test_a_file_that_others_can_write_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digests are no proof: who can write it can write them, too."""
    before = os.umask(0)
    try:
        assert entry(doubled)(21) == 42
        path = kept_in(folder)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        path.chmod(0o666)
        made = compilations(monkeypatch)
        assert entry(doubled)(21) == 42
    finally:
        os.umask(before)
    assert made == ["doubled"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(("mode", "is_trusted"), [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)])
def test_a_parent_in_which_others_can_rename_is_not_trusted(mode: int, is_trusted: bool, tmp_path: Path) -> None:
    """Who can write a parent puts a folder of the same name in the place of this user's."""
    place, own = files.place_of(Path(__file__), "one", b""), tmp_path / "parent" / "between" / "own"
    own.mkdir(parents=True, mode=0o755)
    assert place.is_trusted(own)
    (tmp_path / "parent").chmod(mode)
    assert place.is_trusted(own) == is_trusted
    (tmp_path / "link").symlink_to("parent")
    assert place.is_trusted(tmp_path / "link" / "between" / "own") == is_trusted


def test_folders_of_other_users_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, own = files.place_of(Path(__file__), "one", b""), tmp_path / "own"
    own.mkdir(0o755)
    assert place.is_trusted(own)
    assert not place.is_trusted(tmp_path / "none")
    lstat = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        found = list(lstat(path))
        found[stat.ST_UID] = max(os.geteuid(), Path(__file__).stat().st_uid) + 1
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", of_another)
    assert not place.is_trusted(own)
    assert place.is_trusted(Path(__file__).parent / "__pycache__")  # as Python does


def test_code_under_another_name_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other kinds of arguments it would read others' memory."""
    assert entry(_same)(3) == 3
    of_integer = kept_in(folder)
    assert entry(_same)(0.5) == 0.5
    [of_float] = set(folder.rglob("*.kvo")) - {of_integer}
    of_integer.replace(of_float)
    made = compilations(monkeypatch)
    assert entry(_same)(0.5) == 0.5
    assert made == ["_same"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
        lambda whole: whole[:100] + bytes(len(whole) - 100),
    ],
)
def test_a_file_that_is_not_whole_is_made_again(
    damage: Callable[[bytes], bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entry(doubled)(21) == 42
    path = kept_in(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    made = compilations(monkeypatch)
    assert entry(doubled)(21) == 42
    assert made == ["doubled"]
    assert len(path.read_bytes()) == len(whole)
    assert entry(doubled)(21) == 42
    assert made == ["doubled"]


@pytest.mark.parametrize("other", ["processor", "numba", "setting"])
def test_code_of_another_machine_is_not_loaded(
    other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    assert entry(doubled)(21) == 42
    made = compilations(monkeypatch)
    if other == "processor":
        monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "another")
    elif other == "numba":
        (tmp_path / "_version.py").write_text("9.9")
        monkeypatch.setattr(loading, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    else:
        monkeypatch.setenv("NUMBA_OPT", "1")
    loading.machine.cache_clear()
    try:
        assert entry(doubled)(21) == 42
    finally:
        loading.machine.cache_clear()
    assert made == ["doubled"]
    assert len(list(folder.rglob("*.kvo"))) == 2


def test_a_full_disk_costs_no_result(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert entry(doubled)(21) == 42
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def run_alone(folder: Path, hash_seed: int = 0) -> subprocess.Popen[str]:
    """Begin a process that calls an entry and tells whether numba was imported."""
    script = folder / "alone.py"
    script.write_text(ALONE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)


ALONE = """
import math
import sys
import numpy as np
from measure.machinecode.entries import entry
from measure.machinecode.kernels import kernel

@kernel
def one(number):
    return number + (number in (1, 21)) + (np.nextafter(0.0, 1.0) > 0.0) - (np.exp(number / 7.0) > math.log(number))

@entry
def doubled(number):
    return 2 * one(number)

print(doubled(21), "numba" in sys.modules)
"""


def test_machine_code_on_disk_is_called_without_numba(folder: Path) -> None:
    """Its digest is the same in each process."""
    assert run_alone(folder, 1).communicate()[0] == "44 True\n"
    assert run_alone(folder, 2).communicate()[0] == "44 False\n"


def test_processes_at_once_leave_one_whole_file(folder: Path) -> None:
    several = [run_alone(folder) for _ in range(3)]
    assert {one.communicate()[0].split()[0] for one in several} == {"44"}
    assert [path.suffix for path in (folder / kept_in(folder).parent).iterdir()] == [files.SUFFIX]
    assert run_alone(folder).communicate()[0] == "44 False\n"


class Pair(NamedTuple):
    counts: Any
    table: Any


class Nested(NamedTuple):
    pair: Pair
    scale: float
    salt: np.uint64
    is_on: bool
    shift: int


RECORD = np.dtype([("count", np.int64), ("time_ms", np.float64)])


@entry
def _visit(nested: Nested, bare: Any, place: int) -> float:
    nested.pair.counts[place].count += nested.shift
    bare[0] = nested.salt
    if nested.is_on:
        nested.pair.table[1, place] = len(nested.pair.counts)
    return float(nested.scale * nested.pair.counts[place].time_ms)


def test_arguments_of_all_kinds() -> None:
    counts = np.zeros(3, RECORD)
    counts["time_ms"] = 2.0, 3.0, 4.0
    pair, bare = Pair(counts, np.zeros((2, 3), np.int32)), np.zeros(1, np.uint64)
    salt = np.uint64(2**64 - 3)
    assert _visit(Nested(pair, 0.5, salt, True, -7), bare, 2) == 2.0
    assert counts["count"].tolist() == [0, 0, -7]
    assert pair.table.tolist() == [[0, 0, 0], [0, 0, 3]]
    assert bare.tolist() == [2**64 - 3]
    assert _visit(Nested(pair, np.inf, salt, False, 1), bare, 1) == np.inf
    assert pair.table.tolist() == [[0, 0, 0], [0, 0, 3]]


def test_results_of_all_kinds() -> None:
    large = np.uint64(2**64 - 1)
    assert entry(_same)(-5) == -5
    assert entry(_same)(-0.5) == -0.5
    assert entry(_same)(True) is True
    assert entry(_same)(False) is False
    assert entry(_same)(large) == 2**64 - 1
    assert entry(_none)(1) is None
    assert entry(_seven)(1) == 7


def _same(one: Any) -> Any:
    return one


def _none(_: Any) -> None:
    return None


def _seven(_: int) -> int:
    return 7


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (np.zeros((4, 4))[:, 0], r"array of shape \(4,\), strides \(32,\); expected a contiguous one"),
        ([1], "list; expected an array, a named tuple or a number"),
        (2**63, "9223372036854775808: an integer for machine code; expected 64 bits, or numpy.uint64"),
    ],
)
def test_arguments_that_machine_code_cannot_read_are_refused(one: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        entry(_none)(one)


def test_exceptions_of_machine_code_are_raised() -> None:
    divided = entry(_divided)
    assert divided(7, 2) == 3
    with pytest.raises(ZeroDivisionError):
        divided(7, 0)
    with pytest.raises(ValueError, match="seven"):
        divided(7, 7)


def _divided(one: int, other: int) -> int:
    if other == 7:
        raise ValueError("seven")
    return one // other


def test_threads_run_beside_each_other() -> None:
    """Without Python's lock: each waits for a word of the other, which neither could write while the first runs."""
    words = np.zeros(2, np.int64)
    meet = entry(_meet)
    meet(np.ones(2, np.int64), 0)  # compiled before
    threads = [threading.Thread(target=meet, args=(words, place)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert words.tolist() == [1, 1]


def _meet(words: Any, place: int) -> None:
    words[place] = 1
    waited = 0
    while words[1 - place] == 0:
        waited += 1
        words[place] = 1 + 0 * waited


def _of_offset(number: int) -> int:
    return total(number, OFFSET)


def test_a_digest_tells_of_code_constants_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(_of_offset)
    assert digest_of(_of_offset) == before
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "OFFSET", 11)
        assert digest_of(_of_offset) != before
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "total", difference)
        assert digest_of(_of_offset) != before
    assert digest_of(_of_offset) == before
    assert digest_of(doubled) != digest_of(tripled)
