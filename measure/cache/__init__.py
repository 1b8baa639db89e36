"""Block hashes of a trace as numbers: chains, hits of an unlimited cache, LRU depths, hits at every size."""
