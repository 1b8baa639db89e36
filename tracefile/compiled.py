"""Selection of compiled modules: all are used if each was compiled from its current source, else none is."""

import os
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import source_hash, spec_from_file_location
from pathlib import Path

LIBRARY = "kvtape__mypyc"
PACKAGES = frozenset({"engines", "measure", "sim"})
"""Packages with compiled modules."""
ROOT = Path(__file__).absolute().parent.parent
PURE = os.environ.get("KVTAPE_PURE", "0") != "0"


@cache
def recorded() -> dict[str, str]:
    """Return the source digest of each module that ``setup.py`` compiled for this Python."""
    record = ROOT / "tracefile" / f"compiled{EXTENSION_SUFFIXES[0]}.txt"
    return dict(line.split() for line in record.read_text().splitlines()) if record.exists() else {}


@cache
def uses_compiled() -> bool:
    """Return whether compiled modules exist, match their sources, and ``KVTAPE_PURE`` is not set."""
    return bool(recorded()) and not PURE and all(_digest(_source(name)) == value for name, value in recorded().items())


def _source(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def _digest(source: Path) -> str:
    return source_hash(source.read_bytes()).hex() if source.exists() else ""


class SourceFinder:
    """Import finder that prefers the source of a module whose compiled form is stale; Python would prefer the compiled.

    A compiled module without a recorded digest is stale: its compilation was interrupted, or it left the list.
    Also finds mypyc's shared library, which an editable installation knows only if it compiled the library.
    """

    @staticmethod
    def find_spec(name: str, _path: object, _target: object = None) -> ModuleSpec | None:
        if name == LIBRARY:
            return spec_from_file_location(name, ROOT / f"{LIBRARY}{EXTENSION_SUFFIXES[0]}")
        if name.partition(".")[0] not in PACKAGES or (name in recorded() and uses_compiled()):
            return None
        source = _source(name)
        return spec_from_file_location(name, source) if source.exists() else None


sys.meta_path.insert(0, SourceFinder)


@cache
def warn_if_plain() -> None:
    """Warn once that simulations run uncompiled, unless the user requested it with ``KVTAPE_PURE``."""
    if not uses_compiled() and not PURE:
        reason = "sources are newer than their compiled form" if recorded() else "not compiled"
        compiles = "a C compiler and another installation compile them"
        print(f"{reason}: simulations take about 30 × as long; {compiles}", file=sys.stderr)
