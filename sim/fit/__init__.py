"""The fit: an engine's schedule out of a capture, and the latency parameters that explain it."""
