"""The compiled form of a function, equal to its Python form, which is the rule.

``pip install`` builds it where it finds a compiler (``setup.py``). ``KVTAPE_PURE=1`` leaves it unused.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

PURE = os.environ.get("KVTAPE_PURE", "0") not in ("", "0")

Form = TypeVar("Form", bound=Callable[..., Any])


def compiled(plain: Form, module: str) -> Form:
    """Return the function of the same name in a compiled module; ``plain`` without one."""
    if PURE:
        return plain
    try:
        found: Form = getattr(importlib.import_module(module), plain.__name__)
    except ImportError:
        return plain
    return found


def forms() -> str:
    """Return the form in use: ``compiled`` or ``python``."""
    return "python" if PURE or importlib.util.find_spec("wire.usualevents") is None else "compiled"
