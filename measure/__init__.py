"""Numbers computed from records, each defined once: quantiles, survival, distances, LRU depths, histograms."""

from tracefile import compiled as compiled  # before any module that may be compiled
