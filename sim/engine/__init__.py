"""The engine in virtual time, plain and compiled, and its predicted trace."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
