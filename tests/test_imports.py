"""Imports follow the house: rooms import only the rooms below them, and so do the folders inside a room."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A room, and the rooms that it may import.
MAY_IMPORT = {
    "tracefile": set(),
    "measure": {"tracefile"},
    "wire": set(),
    "engines": {"tracefile", "wire"},
    "tap": {"tracefile", "measure", "wire", "engines"},
    "loadgen": {"tracefile", "measure", "wire", "engines"},
    "replay": {"tracefile", "measure", "wire", "engines", "loadgen"},
    "sim": {"tracefile", "measure", "engines"},
    "report": {"tracefile", "measure"},
    # The Python interface calls all commands, and no room calls it.
    "kvtape": {"tracefile", "measure", "wire", "engines", "loadgen", "replay", "sim", "report"},
}
# Folders that may import more than their room may.
MORE = {
    "sim/serving": {"wire"},
    "sim/cache": {"report"},
    "sim/forecast": {"report"},
}
# A room's folders from the ground up: a folder imports only those before it, and "" (the room's own files) all of them.
FLOORS = {
    "tracefile": [
        *("records", "commandline", "hashing", "storage", "files", "analysis", ""),
    ],
    "measure": ["cache", "", "metrics"],
    "wire": ["", "client"],
    "tap": ["ipc", "prompts", "recorder", "logs", "proxy", "admin", "supervisor", ""],
    "loadgen": ["core", "text", "datasets", "plan", "sending", "runs", ""],
    "sim": [
        *("vllm", "sglang", "llamacpp", "latency", "workload", "cache", "engine", "fit", "forecast", "forecast/flags"),
        *("serving", ""),
    ],
    "report": ["pages", "compare", "grid", "trace", ""],
}
# Folders of loadgen that replay stands on.
REPLAY_USES = {"core", "text", "sending", "runs"}
# The simulator is a function of its inputs: no network, no event loop, no clock outside its real-time server.
CLOCKLESS = {"asyncio", "socket", "time", "httpx", "fastapi", "uvicorn", "threading", "random"}
MOST_MODULES = 20


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Every name a file imports, wherever in it the import stands."""
    result: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            result |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the dependency of a file"
            result |= {f"{node.module}.{name.name}" for name in node.names}
    return frozenset(result)


def sources(space: str) -> list[Path]:
    result = sorted((ROOT / space).rglob("*.py"))
    assert result, f"no source files in {space}/"
    return result


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for space in MAY_IMPORT for path in sources(space)}


def resolved(name: str) -> str | None:
    """The module of ours that an imported name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


@cache
def module_imports() -> dict[str, set[str]]:
    """Modules of ours by the module that imports them."""
    result: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        known = {resolved(name) for name in imported_modules(path)}
        result[module] = {name for name in known if name and name != module}
    return result


def folder_of(module: str) -> str:
    return str(MODULES[module].parent.relative_to(ROOT))


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                result.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return result


@pytest.mark.parametrize("space", sorted(MAY_IMPORT))
def test_packages_import_only_lower_packages(space: str) -> None:
    for path in sources(space):
        roots = {name.partition(".")[0] for name in imported_modules(path)} - {space}
        position = str(path.relative_to(ROOT))
        more = {name for folder, names in MORE.items() if position.startswith(f"{folder}/") for name in names}
        forbidden = roots & (MAY_IMPORT.keys() | {"scripts", "tests"}) - MAY_IMPORT[space] - more
        assert not forbidden, f"{position} imports {sorted(forbidden)}"


@pytest.mark.parametrize("space", sorted(FLOORS))
def test_folders_import_only_lower_folders(space: str) -> None:
    floors = [f"{space}/{name}".rstrip("/") for name in FLOORS[space]]
    for module, names in module_imports().items():
        if not module.startswith(f"{space}.") and module != space:
            continue
        folder = folder_of(module)
        assert folder in floors, f"{folder}/ has no floor in this test"
        above = {name for name in names if folder_of(name) in floors[floors.index(folder) + 1 :]}
        assert not above, f"{module} in {folder}/ imports {sorted(above)} of a higher floor"


def test_imports_have_no_cycle() -> None:
    imports = module_imports()
    folders: dict[str, set[str]] = defaultdict(set)
    for module, names in imports.items():
        folders[folder_of(module)] |= {folder_of(name) for name in names} - {folder_of(module)}
    assert not cycles(folders)
    assert not cycles(imports)


def test_replay_imports_only_sending_from_loadgen() -> None:
    for path in sources("replay"):
        used = {name.split(".")[1] for name in imported_modules(path) if name.startswith("loadgen.")}
        assert used <= REPLAY_USES, f"{path.relative_to(ROOT)} imports {sorted(used - REPLAY_USES)} of loadgen"


def test_simulator_imports_no_network_event_loop_or_clock() -> None:
    for path in sources("sim"):
        if "serving" in path.parts:
            continue
        roots = {module.partition(".")[0] for module in imported_modules(path)}
        assert not roots & CLOCKLESS, f"{path.relative_to(ROOT)} imports {sorted(roots & CLOCKLESS)}"


def test_folders_have_few_modules() -> None:
    for space in MAY_IMPORT:
        for folder in {path.parent for path in sources(space)}:
            modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(modules) <= MOST_MODULES, f"{folder.relative_to(ROOT)} has {len(modules)} modules"
