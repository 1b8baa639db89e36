"""Quantiles of the normal and of Student's t distribution, from scipy, imported on first use."""

from typing import Any

from tracefile.records.extras import load_extra


def ndtri(shares: Any) -> Any:
    """Return quantiles of the standard normal distribution at ``shares``."""
    return load_extra("scipy.special").ndtri(shares)


def stdtrit(freedom: float, shares: Any) -> Any:
    """Return quantiles of Student's t distribution with ``freedom`` degrees of freedom at ``shares``."""
    return load_extra("scipy.special").stdtrit(freedom, shares)
