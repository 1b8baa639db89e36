"""The fit: an engine's schedule out of a capture, and the latency parameters that explain it."""

from typing import Literal

CachedSource = Literal["factual", "simulated"]
"""Cached tokens as the captures report them, or as a simulated pool has them."""
