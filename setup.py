"""Compile the modules of ``compiled_modules`` with mypyc; without a C compiler, install their sources alone.

``KVTAPE_PURE=1`` compiles none. ``python setup.py build_ext --inplace`` compiles in a clone, as ``make`` does.
"""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import source_hash
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

compiled_modules: tuple[str, ...] = (
    "engines/routing/costs.py",
    "engines/routing/load.py",
    "engines/routing/prefix.py",
    "engines/routing/records.py",
    "engines/routing/router.py",
    "measure/cache/hashtable.py",
    "measure/cache/stackdepth.py",
    "sim/engine/apiserver.py",
    "sim/engine/columns.py",
    "sim/engine/dispatch.py",
    "sim/engine/eventheap.py",
    "sim/engine/fleet.py",
    "sim/engine/gap_json.py",
    "sim/engine/loop.py",
    "sim/engine/predicted_records.py",
    "sim/engine/simulatedrequest.py",
    "sim/latency/stepcost.py",
    "sim/latency/stepnoise.py",
    "sim/vllm/blocks.py",
    "sim/vllm/groups.py",
    "sim/vllm/hybridcache.py",
    "sim/vllm/request.py",
    "sim/vllm/scheduler.py",
    "sim/vllm/kvcache.py",
    "sim/vllm/offloading.py",
    "sim/vllm/segments.py",
    "sim/vllm/states.py",
)
"""Sources in one library: they call one another without the interpreter, and are used all or none."""

LIBRARY = "kvtape__mypyc"
OPTIONS = ("--config-file=", "--explicit-package-bases", "--follow-imports=silent", "--ignore-missing-imports")
"""Of mypy. An isolated build has none of the libraries that modules import: it ignores that they are missing."""
RECORD = f"tracefile/compiled{EXTENSION_SUFFIXES[0]}.txt"
"""Digests of the sources that were compiled: ``tracefile/compiled.py`` compares them."""


def module_name(source: str) -> str:
    """Return the dotted name of a source."""
    return source.removesuffix(".py").replace("/", ".")


class Compile(build_ext):  # type: ignore[misc]
    """Compiles all modules or none, and records the digests of what it compiled."""

    def run(self) -> None:
        """Make C of the modules and compile it; say why if that fails, and leave none."""
        if not self.extensions:
            return
        digests = [f"{module_name(name)} {source_hash(Path(name).read_bytes()).hex()}\n" for name in compiled_modules]
        places = [Path(self.build_lib), *([Path()] if self.inplace else [])]
        for place in places:
            (place / RECORD).unlink(missing_ok=True)
        self.built: set[str] = set()
        if self.made_c():
            super().run()
        for place in places:
            if self.built == {extension.name for extension in self.extensions}:
                (place / RECORD).parent.mkdir(parents=True, exist_ok=True)
                (place / RECORD).write_text("".join(digests))
            else:  # one that was compiled from an older source would be imported
                for extension in self.extensions:
                    (place / self.get_ext_filename(extension.name)).unlink(missing_ok=True)

    def made_c(self) -> bool:
        """Fill the extensions in; not before: metadata and sdists need their names alone, and mypy takes seconds."""
        try:
            from mypyc.build import mypycify  # noqa: PLC0415

            made = mypycify([*OPTIONS, *compiled_modules], opt_level="2", debug_level="0", group_name="kvtape")
        except (ImportError, SystemExit) as error:
            print(f"not compiled: mypyc: {error}", file=sys.stderr)
            return False
        for extension in self.extensions:
            (source,) = (one for one in made if one.name == extension.name)
            extension.sources, extension.depends = source.sources, source.depends
            extension.include_dirs = source.include_dirs
            extension.extra_compile_args = list(source.extra_compile_args)
            if os.name != "nt":
                # A new warning must not fail. A fused multiply-add would give other bits than Python does.
                extension.extra_compile_args += ["-Wno-error", "-ffp-contract=off", "-fvisibility=hidden"]
        return True

    def build_extension(self, ext: Extension) -> None:
        """Compile one, and note that it was: what fails is skipped with a warning."""
        super().build_extension(ext)
        self.built.add(ext.name)


def extensions() -> list[Extension]:
    """Return the library and a module for each source, without their C."""
    if os.environ.get("KVTAPE_PURE", "0") != "0" or not compiled_modules:
        return []
    return [Extension(name, [], optional=True) for name in (LIBRARY, *map(module_name, compiled_modules))]


setup(ext_modules=extensions(), cmdclass={"build_ext": Compile})
