"""The fit: an engine's schedule out of a capture, and the latency parameters that explain it."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
