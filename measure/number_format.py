"""Number formats of terminals, pages and reports: counts, shares, latencies, sizes."""

from typing import Final

_SIZES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES: Final = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
NOTHING: Final = "–"


def count(value: float) -> str:
    """Return a count: 1,234; from 100,000 on 123k, 1.23M."""
    if value < 100_000:
        return f"{value:,.0f}"
    return compact(value)


def compact(value: float) -> str:
    """Return three digits and a letter: 950, 12.3k, 1.05M."""
    for size, letter in _SIZES:
        if value >= size * 0.9995:
            return f"{_three_digits(value / size)}{letter}"
    return f"{value:.0f}"


def capitalized(text: str) -> str:
    """Return text with a capital first letter."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Return text with a capital first letter and a full stop."""
    return capitalized(text.removesuffix(".")) + "."


def round_number(value: float) -> str:
    """Format a number with few digits, without rounding: 0.5, 950, 20k, 1.5M."""
    for size, letter in _SIZES:
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def rate(value: float) -> str:
    """Return a number per second: 0, 0.4, 12.3, 1.2k."""
    if value >= 999.5:
        return compact(value)
    return f"{value:.1f}".removesuffix(".0")


def size(value: float) -> str:
    """Return bytes with their unit: 512 B, 1.50 MiB."""
    for unit, name in _BYTES:
        if value >= unit:
            return f"{_three_digits(value / unit)} {name}"
    return f"{value:.0f} B"


def cache_size(tokens: int, kv_bytes_per_token: int | None) -> str:
    """Format a KV cache size in tokens, and in memory if the bytes per token are known: 2.10M tokens, 256 GiB."""
    memory = "" if kv_bytes_per_token is None else f", {size(tokens * kv_bytes_per_token)}"
    return f"{count(tokens)} tokens{memory}"


def factor(value: float) -> str:
    """Format three digits without an exponent: 1.28, 14.1, 1,410."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Format a share or an error in percent, never rounded up to 100 %; a dash for null."""
    if value is None:
        return NOTHING
    if 0.9995 <= value < 1.0:
        return "99.9 %"
    digits = 0 if value in (0.0, 1.0) or value >= 10 else 1
    return f"{value * 100:,.{digits}f} %"


def share_of(amount: float, total: float) -> str:
    """Format an amount as a percentage of a total; a dash for a total of 0."""
    return share(amount / total if total else None)


def signed_percent(value: float) -> str:
    """Format a relative error: +4.2 %, −12 %, 0.0 %; from +200 % on a factor: ×14."""
    if value >= 2.0:
        return f"×{factor(1.0 + value)}"
    digits = f"{abs(value) * 100:.{1 if abs(value) < 0.0995 else 0}f}"
    sign = "" if digits == "0.0" else "+" if value > 0 else "−"
    return f"{sign}{digits} %"


def duration_ms(value_ms: float) -> str:
    """Format a latency in ms without its unit, with about three digits: 0.85, 9.4, 94.0, 3,446."""
    if value_ms < 1:
        return f"{value_ms:.2f}"
    return f"{value_ms:.1f}" if value_ms < 100 else f"{value_ms:,.0f}"


def duration(value_ms: float) -> str:
    """Format a latency with its unit: 14 µs, 0.4 ms, 37 ms, 1.25 s, 17.5 min, 89.4 h."""
    if value_ms < 1:
        return f"{value_ms * 1e3:.0f} µs"
    if value_ms < 10:
        return f"{value_ms:.1f} ms"
    if value_ms < 1_000:
        return f"{value_ms:.0f} ms"
    if value_ms < 600_000:
        return f"{value_ms / 1e3:.3g} s"
    return f"{factor(value_ms / 60e3)} min" if value_ms < 7_200_000 else f"{factor(value_ms / 3.6e6)} h"


COMPLETE_SHARE: Final = 0.9
"""Share of requests from which on the text does not mention missing requests."""


def coverage_text(requests: int, total: int, missing: str) -> str:
    """Return the coverage of a number as text: of 31 of 72 requests; empty from 90 % on."""
    is_complete = requests >= COMPLETE_SHARE * total
    return "" if is_complete else f"of {requests:,} of {total:,} requests: the others have no {missing}"


NOTHING_CACHED = (
    "0 in all {} reports, though prompts repeat earlier ones; the prefix cache is off, or the engine reports a constant"
)
"""Reason to doubt prefix hits; argument: number of requests that report them."""


def rounded_hits(hits: int, block_size: int) -> str:
    """Return a note on prefix hits that end inside the trace's blocks, as in a token-granular cache."""
    return (
        f"{count(hits)} captured hits end inside blocks of {block_size} tokens: they are token-granular, and a replay "
        "rounds them down to blocks; a tap that knows the engine's page size records them to the token"
    )


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def listed(words: list[str]) -> str:
    """Join words: a, b and c; ``unknown`` for no word."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "unknown"
