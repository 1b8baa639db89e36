"""The version of this program; pyproject.toml reads it here."""

from typing import Final

VERSION: Final = "0.1.0"
