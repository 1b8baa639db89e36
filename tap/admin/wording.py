"""Numbers as the live page says them; the page shows these texts as they are, so there is one place that rounds."""

_SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
NOTHING = "–"


def count(value: float) -> str:
    """1,234; from 100,000 on 123k, 1.23M."""
    if value < 100_000:
        return f"{value:,.0f}"
    return compact(value)


def compact(value: float) -> str:
    """Three digits and a letter: 950, 12.3k, 1.05M."""
    for size, letter in _SIZES:
        if value >= size * 0.9995:
            return f"{_three_digits(value / size)}{letter}"
    return f"{value:.0f}"


def rate(value: float) -> str:
    """A number per second: 0, 0.4, 12.3, 1.2k."""
    if value >= 999.5:
        return compact(value)
    return f"{value:.1f}".removesuffix(".0")


def size(value: float) -> str:
    """Bytes."""
    for unit, name in _BYTES:
        if value >= unit:
            return f"{_three_digits(value / unit)} {name}"
    return f"{value:.0f} B"


def share(part: float, whole: float) -> str:
    """A percentage; a dash for a share of nothing."""
    if not whole:
        return NOTHING
    percent = 100 * part / whole
    # 99.97 % is not all of it.
    return f"{percent:.1f} %" if percent < 99.95 or part >= whole else "> 99.9 %"


def wait(milliseconds: float) -> str:
    """A time: 0.4 ms, 37 ms, 1.25 s."""
    if milliseconds < 10:
        return f"{milliseconds:.1f} ms"
    if milliseconds < 1_000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1e3:.3g} s"


def brief(seconds: float) -> str:
    """A time the tap itself takes: 14 µs, 1.2 ms."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else wait(seconds * 1e3)


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
