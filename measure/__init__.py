"""Numbers computed from records, each defined once: quantiles, survival, distances, LRU depths, histograms."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
