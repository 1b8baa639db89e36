"""Prefix hits without time: pool, curve, misses, reuse."""
