"""Names and modules that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class LateModule:
    """A module, imported with the first of its attributes; each is found once, so that later uses cost nothing."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self._module), name)
        setattr(self, name, found)
        return found


def late_modules(package: str, names: str) -> Iterator[LateModule]:
    """Modules of ``package`` by their names, in one string of words."""
    return (LateModule(f"{package}.{name}") for name in names.split())


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package`` (PEP 562), by its names in each of the ``modules``: words."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def imported(name: str) -> Any:
        if name not in homes:
            expected = f"; expected one of {', '.join(sorted(homes))}" if not name.startswith("_") else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{expected}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return imported
