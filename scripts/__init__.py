"""Benchmarks, demos and real engines; run as ``python -m scripts.NAME``."""
