"""The parts import only what the architecture allows, and only the data planes import an event loop."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "tracefile": set(),
    "wire": set(),
    "tap": {"tracefile", "wire"},
    "loadgen": {"tracefile", "wire"},
    "replay": {"tracefile", "wire", "loadgen"},
    "sim": {"tracefile"},
    "report": {"tracefile"},
}
# Commands that hold forecasts against measurements, or beside one another, count as a report counts.
JUDGES = {"sim/calibrate.py", "sim/whatif.py", "sim/outlook.py", "sim/search.py"}
# The simulator is a function of its inputs: no network, no event loop, no clock outside its real-time server.
CLOCKLESS = {"asyncio", "socket", "time", "httpx", "fastapi", "uvicorn", "threading", "random"}
SIM_SERVER = {"serve.py", "realtime.py", "alarm.py"}


def imported_modules(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what a file depends on"
            yield node.module or ""


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no source files in {package}/"
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_part_imports_only_what_the_architecture_allows(package: str) -> None:
    forbidden = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
    for path in sources(package):
        roots = {module.partition(".")[0] for module in imported_modules(path)}
        if str(path.relative_to(ROOT)) in JUDGES:
            roots.discard("report")
        assert not roots & forbidden, f"{path.relative_to(ROOT)} imports {sorted(roots & forbidden)}"
        assert not roots & {"scripts", "tests"}, f"{path.relative_to(ROOT)} imports scripts or tests"


def test_the_simulator_has_no_network_no_event_loop_and_no_clock() -> None:
    for path in sources("sim"):
        if path.name in SIM_SERVER or path.parent.name == "serving":
            continue
        roots = {module.partition(".")[0] for module in imported_modules(path)}
        assert not roots & CLOCKLESS, f"{path.relative_to(ROOT)} imports {sorted(roots & CLOCKLESS)}"


def test_every_part_is_packaged() -> None:
    import tomllib

    packaged = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {str(path.parent.relative_to(ROOT)).replace("/", ".") for part in MAY_IMPORT for path in sources(part)}
    assert present <= packaged
