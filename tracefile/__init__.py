"""Trace schema, block hashes, sessions, and reading and writing of trace files. Imports no other package of kvtape."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported
