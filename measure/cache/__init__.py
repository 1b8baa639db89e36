"""Prefix cache measures of a trace: chains of block hashes, unlimited hits, LRU depths, hits at every size."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
