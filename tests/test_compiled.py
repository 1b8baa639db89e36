"""Compiled modules: built where there is a compiler, used while they are what their sources say."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import source_hash
from pathlib import Path

import pytest

from tracefile.compiled import PACKAGES, SourceFinder

ROOT = Path(__file__).parent.parent
MODULE = "sim/vllm/counted.py"
RECORD = f"tracefile/compiled{EXTENSION_SUFFIXES[0]}.txt"
SOURCE = '''"""Counts."""

from librt.vecs import vec
from mypy_extensions import i64


def total(numbers: vec[i64]) -> i64:
    """Sum."""
    result: i64 = 0
    for number in numbers:
        result += number
    return result
'''
ASK = """
from librt.vecs import vec
from mypy_extensions import i64
from sim.vllm import counted
from tracefile import compiled
compiled.warn_if_plain(), compiled.warn_if_plain()
print(counted.__file__.rpartition(".")[2], compiled.uses_compiled(), counted.total(vec[i64]([1, 2, 1 << 40])))
"""
COMPILED = f"{'pyd' if os.name == 'nt' else 'so'} True {3 + (1 << 40)}\n"
PLAIN = f"py False {3 + (1 << 40)}\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project with our ``setup.py`` and a compiled module, in place."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    home = project(tmp_path_factory.mktemp("built"))
    build(home)
    return home


def project(home: Path) -> Path:
    for name in ("sim/vllm", "tracefile"):
        (home / name).mkdir(parents=True)
    shutil.copy(ROOT / "sim" / "__init__.py", home / "sim")
    shutil.copy(ROOT / "sim" / "vllm" / "__init__.py", home / "sim" / "vllm")
    (home / "tracefile" / "__init__.py").touch()
    shutil.copy(ROOT / "tracefile" / "compiled.py", home / "tracefile")
    (home / MODULE).write_text(SOURCE)
    lines = (ROOT / "setup.py").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("compiled_modules"))
    end = next(i for i in range(at, len(lines)) if lines[i].endswith(")"))
    lines[at : end + 1] = [f'compiled_modules = ("{MODULE}",)']
    (home / "setup.py").write_text("\n".join(lines))
    (home / "pyproject.toml").write_text(
        '[project]\nname = "kvtape"\nversion = "0"\n[tool.setuptools]\npackages = ["sim", "sim.vllm", "tracefile"]\n'
    )
    return home


def compiled_modules() -> list[str]:
    modules = [line.strip(' ",') for line in (ROOT / "setup.py").read_text().splitlines() if line.endswith('.py",')]
    assert "sim/vllm/scheduler.py" in modules
    return modules


def build(home: Path, *words: str, **environment: str) -> str:
    command = [sys.executable, "setup.py", *(words or ("build_ext", "--inplace"))]
    env = {name: value for name, value in os.environ.items() if name != "KVTAPE_PURE"} | environment
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def asked(home: Path, **environment: str) -> tuple[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "KVTAPE_PURE"} | environment
    done = subprocess.run([sys.executable, "-c", ASK], cwd=home, env=env, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_compiled_modules_are_used(built: Path) -> None:
    assert asked(built) == (COMPILED, "")


def test_shared_library_is_found_beside_the_sources() -> None:
    spec = SourceFinder.find_spec("kvtape__mypyc", None)
    assert spec is not None
    assert spec.origin == str(ROOT / f"kvtape__mypyc{EXTENSION_SUFFIXES[0]}")


def test_kvtape_pure_runs_the_sources(built: Path) -> None:
    assert asked(built, KVTAPE_PURE="1") == (PLAIN, "")
    assert asked(built, KVTAPE_PURE="0") == (COMPILED, "")


def test_changed_source_runs_uncompiled_with_one_warning(built: Path, tmp_path: Path) -> None:
    home = shutil.copytree(built, tmp_path / "copy")
    (home / MODULE).touch()
    assert asked(home) == (COMPILED, "")
    (home / MODULE).write_text(SOURCE + "\n")
    out, err = asked(home)
    assert out == PLAIN
    assert err.count("\n") == 1
    assert err.startswith("sources are newer than their compiled form: simulations take about 30 × as long")


@pytest.mark.parametrize("record", ["", "sim.__init__ {digest}\n"], ids=["interrupted", "not listed any more"])
def test_unrecorded_compiled_module_is_not_used(built: Path, tmp_path: Path, record: str) -> None:
    home = shutil.copytree(built, tmp_path / "copy")
    digest = source_hash((home / "sim" / "__init__.py").read_bytes()).hex()
    (home / RECORD).write_text(record.format(digest=digest))
    assert asked(home)[0] == PLAIN.replace("False", str(bool(record)))


def test_packages_of_compiled_modules() -> None:
    modules = compiled_modules()
    assert {module.partition("/")[0] for module in modules} == PACKAGES
    for package in {(ROOT / module).parent for module in modules}:
        assert "import tracefile.compiled " in (package / "__init__.py").read_text(), package


def test_modules_compile_without_installed_libraries() -> None:
    # As in the isolated environment of pip and uv: an error of mypy there leaves every installation uncompiled.
    (options,) = re.findall(r"^OPTIONS = (.*)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    words = ["-m", "mypy", "--cache-dir", os.devnull, "--no-site-packages", *ast.literal_eval(options)]
    done = subprocess.run(
        [sys.executable, *words, *compiled_modules()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_without_a_compiler_only_sources_are_installed(built: Path, tmp_path: Path) -> None:
    home = shutil.copytree(built, tmp_path / "copy")
    (home / MODULE).write_text(SOURCE.replace("= 0", "= 1"))
    build(home, CC="/bin/false")
    out, err = asked(home)
    assert out == PLAIN.replace(str(3 + (1 << 40)), str(4 + (1 << 40)))
    assert err.startswith("not compiled: simulations take about 30 × as long")
    assert not list(home.rglob("counted*.so"))


def test_a_wheel_has_the_compiled_modules_and_their_record(built: Path, tmp_path: Path) -> None:
    home = shutil.copytree(built, tmp_path / "copy", ignore=shutil.ignore_patterns("*.so", "compiled.*.txt"))
    install = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target"]
    subprocess.run([sys.executable, *install, tmp_path / "site", home], check=True)
    assert asked(tmp_path / "site") == (COMPILED, "")
    assert not list(home.glob("measure/*.so"))
