"""Modules that are imported when they are first used."""

import importlib
from collections.abc import Iterator
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
