"""Optional packages: the error for a missing package names the extra that installs it."""

import importlib
from collections.abc import Mapping
from typing import Any, Final

from tracefile.records.errors import InputError

EXTRAS: Final[Mapping[str, str]] = {
    "plotly": "notebook",
    "pyarrow": "parquet",
    "ray": "ray",
    "s3fs": "s3",
    "scipy": "sim",
    "shtab": "completion",
    "transformers": "tokenizer",
}
"""Extra of the distribution, by package."""


def load_extra(module: str, *, where: str = "") -> Any:
    """Import a module of an optional package; raises InputError, prefixed by ``where``, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise InputError(where + missing_package(package)) from None


def missing_package(package: str) -> str:
    """Return the error message for a package that is not installed."""
    return f"needs {package}: pip install 'kvtape[{EXTRAS[package]}]'"
