"""The compiled form of the SSE parser. Python's is used without a compiler, and with ``KVTAPE_PURE=1``."""

import os
import sysconfig

from setuptools import Extension, setup

WANTED = os.environ.get("KVTAPE_PURE", "0") in ("", "0") and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""The stable interface, one build for all versions of Python, is not there without the interpreter's lock."""

if __name__ == "__main__":
    setup(
        ext_modules=[Extension("wire.usualevents", ["wire/usualevents.c"], py_limited_api=True, optional=True)]
        if WANTED
        else [],
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if WANTED else {},
    )
