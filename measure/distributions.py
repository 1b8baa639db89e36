"""Quantiles of the normal and of Student's t distribution: scipy's, which is imported when one is first computed."""

from typing import Any

from tracefile.records.extras import load_extra


def ndtri(shares: Any) -> Any:
    """Quantile of the standard normal distribution at each of the ``shares``."""
    return load_extra("scipy.special").ndtri(shares)


def stdtrit(freedom: float, shares: Any) -> Any:
    """Quantile of Student's t distribution of so many degrees of freedom at each of the ``shares``."""
    return load_extra("scipy.special").stdtrit(freedom, shares)
