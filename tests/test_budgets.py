"""Lines of each package, flags, commands and small modules against their budgets: a package pays for what it gains."""

import ast
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtape.completion import commands
from tests.test_imports import MODULES, imported_modules, resolved

ROOT = Path(__file__).parent.parent
KINDS = (".py", ".c", ".js", ".css", ".jinja", ".html")
BUDGETS: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvtape"]["lines"]
MOST_FLAGS, MOST_COMMANDS = 240, 26
SMALL_LINES = 60
EXEMPT = {"engines.trtllm"}
"""Every engine is a file of its own."""


def lines(package: str) -> int:
    """Lines of code and templates that git tracks below a folder; bundles of others apart."""
    listed = subprocess.run(["git", "ls-files", package], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(KINDS) and "plotly" not in name]
    return sum(len(file.read_text().splitlines()) for file in files if file.is_file())


@pytest.mark.parametrize("package", BUDGETS)
def test_packages_stay_within_their_budgets(package: str) -> None:
    assert lines(package) <= BUDGETS[package]


def test_flags_and_commands_stay_few() -> None:
    flags = [line for line in (ROOT / "docs" / "commands.md").read_text().splitlines() if line.startswith("| `-")]
    assert len(flags) <= MOST_FLAGS
    assert len(list(commands())) <= MOST_COMMANDS


def words(path: Path) -> Iterator[str]:
    """Yield a file's strings, some of which name modules that run as commands or processes of their own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_small_module_has_several_importers() -> None:
    importers: defaultdict[str, set[Path]] = defaultdict(set)
    for path in (*MODULES.values(), *(ROOT / "scripts").rglob("*.py")):
        for name in {*imported_modules(path), *words(path)}:
            importers[resolved(name) or ""].add(path)
    small = {module for module, path in MODULES.items() if len(path.read_text().splitlines()) < SMALL_LINES}
    entries = {
        module for module, path in MODULES.items() if path.name.endswith(("__init__.py", "__main__.py", "flags.py"))
    }
    assert not {module for module in small - entries - EXEMPT if len(importers[module] - {MODULES[module]}) == 1}
