"""Hits without time: pool, curve, misses, reuse."""
