"""Numbers computed from records, each defined once: quantiles, survival, distances, LRU depths, histograms."""
