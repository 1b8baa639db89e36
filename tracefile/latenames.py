"""Names of a package whose modules are imported when a name is first used (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``, by its names in each of the ``modules``, with blanks between them."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def imported(name: str) -> Any:
        if name not in homes:
            expected = f"; expected one of {', '.join(sorted(homes))}" if not name.startswith("_") else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{expected}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return imported
