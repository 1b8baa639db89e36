"""Benches, demos and studies of the project; run as ``python -m scripts.NAME``."""
