"""Compiled forms of a few functions. Python's forms are used without a compiler, and with ``KVTAPE_PURE=1``."""

import os
import sysconfig

from setuptools import Extension, setup

SOURCES = ("wire/usualchunks.c", "wire/usualevents.c", "wire/usualhead.c", "loadgen/core/promptids.c")
WANTED = os.environ.get("KVTAPE_PURE", "0") in ("", "0") and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""The stable interface, one build for all versions of Python, is not there without the interpreter's lock."""

if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(source.removesuffix(".c").replace("/", "."), [source], py_limited_api=True, optional=True)
            for source in SOURCES
            if WANTED
        ],
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if WANTED else {},
    )
