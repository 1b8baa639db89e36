"""The hub: what a trace is, how it is read and written, hashed and threaded into sessions. Imports nothing of ours."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported
