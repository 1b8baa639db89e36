"""Numbers as a reader reads them, the same on the terminal and on the page."""

from report.compare.results import Quantile, QuantileError


def duration_ms(value_ms: float) -> str:
    """Milliseconds with three significant digits or so: ``0.85``, ``9.4``, ``94``, ``3,446``."""
    if value_ms < 1:
        return f"{value_ms:.2f}"
    return f"{value_ms:.1f}" if value_ms < 100 else f"{value_ms:,.0f}"


def quantile(found: Quantile) -> str:
    """The value, or ``> x`` past the end of what was seen, or a dash."""
    if found.value_ms is not None:
        return duration_ms(found.value_ms) + ("*" if found.thin else "")
    return f"> {duration_ms(found.beyond_ms)}" if found.beyond_ms is not None else "–"


def span_ms(found: Quantile) -> str:
    """The interval, open above where it is."""
    if found.low_ms is None:
        return ""
    high = duration_ms(found.high_ms) if found.high_ms is not None else "∞"
    return f"{duration_ms(found.low_ms)}–{high}"


def factor(value: float) -> str:
    """Three digits, and never an exponent: ``1.28``, ``14.1``, ``1,410``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def signed_percent(share: float) -> str:
    """``+4.2 %``, ``−12 %``; a factor from +200 % on: ``×14``."""
    if share >= 2.0:
        return f"×{factor(1.0 + share)}"
    sign = "+" if share >= 0 else "−"
    return f"{sign}{abs(share) * 100:.{1 if abs(share) < 0.0995 else 0}f} %"


def error_of(found: QuantileError | None) -> str:
    """The signed error, marked ``≈`` where the A/A run is no closer."""
    if found is None:
        return "–"
    return signed_percent(found.signed_error) + (" ≈" if found.inside_aa else "")


def error_span(found: QuantileError | None) -> str:
    """The interval of the signed error, ends separated by ``…`` since they carry signs."""
    if found is None or found.low is None:
        return ""
    return f"{signed_percent(found.low)} … {signed_percent(found.high) if found.high is not None else '∞'}"


def share(value: float | None) -> str:
    """A share or error in percent, never rounded up to 100 %."""
    if value is None:
        return "–"
    if 0.9995 <= value < 1.0:
        return "99.9 %"
    digits = 0 if value in (0.0, 1.0) or value >= 10 else 1
    return f"{value * 100:,.{digits}f} %"
