"""Quantiles and errors of a cell in words, equal on the terminal and on the page."""

from measure.wording import NOTHING, duration_ms, signed_percent
from report.compare.results import Quantile, QuantileError


def quantile_text(found: Quantile) -> str:
    """Return the value, or ``> x`` past the end of what was seen, or a dash."""
    if found.value_ms is not None:
        return duration_ms(found.value_ms) + ("*" if found.thin else "")
    return f"> {duration_ms(found.beyond_ms)}" if found.beyond_ms is not None else NOTHING


def interval_text(found: Quantile) -> str:
    """Return the interval in ms, open above where it is; empty if there is none."""
    if found.low_ms is None:
        return ""
    high = duration_ms(found.high_ms) if found.high_ms is not None else "∞"
    return f"{duration_ms(found.low_ms)}–{high}"


def error_text(found: QuantileError | None) -> str:
    """Return the signed error, marked ``≈`` where the A/A run is no closer."""
    if found is None:
        return NOTHING
    return signed_percent(found.signed_error) + (" ≈" if found.inside_aa else "")


def error_interval_text(found: QuantileError | None) -> str:
    """Return the interval of the signed error; its ends carry signs, so ``…`` separates them."""
    if found is None or found.low is None:
        return ""
    return f"{signed_percent(found.low)} … {signed_percent(found.high) if found.high is not None else '∞'}"
