"""Block hashes of a trace as numbers: chains, hits of an unlimited cache, LRU depths, hits at every size."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
