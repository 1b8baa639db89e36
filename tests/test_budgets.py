"""Lines of each package against its budget in pyproject.toml: a package pays for what it gains."""

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KINDS = (".py", ".c", ".js", ".css", ".jinja", ".html")
BUDGETS: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvtape"]["lines"]


def lines(package: str) -> int:
    """Lines of code and templates that git tracks below a folder; bundles of others apart."""
    listed = subprocess.run(["git", "ls-files", package], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(KINDS) and "plotly" not in name]
    return sum(len(file.read_text().splitlines()) for file in files if file.is_file())


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_stays_within_its_budget(package: str) -> None:
    assert lines(package) <= BUDGETS[package]
