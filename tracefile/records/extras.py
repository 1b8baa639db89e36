"""Packages that only some commands need, each in an extra of the distribution, which is named if one is missing."""

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
"""Extra by package."""


def load_extra(module: str, *, where: str = "") -> Any:
    """Return a module of an extra's package; raises InputError, ``where`` before its words, without the package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise InputError(where + lacking(package)) from None


def lacking(package: str) -> str:
    """Words for a package that is not installed."""
    return f"needs {package}: pip install 'kvtape[{EXTRAS[package]}]'"
