"""Numbers in words, rounded in one place for terminals, pages and reports."""

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
    """Return text with a capital at its beginning, and the rest as it is."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Return text with a capital and a full stop."""
    return capitalized(text.removesuffix(".")) + "."


def round_number(value: float) -> str:
    """Return all digits of a number that has few: 0.5, 950, 20k, 1.5M."""
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
    """Return a cache's size in tokens, and in memory if a token's bytes are known: 2.10M tokens, 256 GiB."""
    memory = "" if kv_bytes_per_token is None else f", {size(tokens * kv_bytes_per_token)}"
    return f"{count(tokens)} tokens{memory}"


def factor(value: float) -> str:
    """Return three digits, and never an exponent: 1.28, 14.1, 1,410."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a share or an error in percent, never rounded up to 100 %; a dash for none."""
    if value is None:
        return NOTHING
    if 0.9995 <= value < 1.0:
        return "99.9 %"
    digits = 0 if value in (0.0, 1.0) or value >= 10 else 1
    return f"{value * 100:,.{digits}f} %"


def share_of(part: float, whole: float) -> str:
    """Return a part as a percentage; a dash for a share of nothing."""
    return share(part / whole if whole else None)


def signed_percent(value: float) -> str:
    """Return a relative error: +4.2 %, −12 %, 0.0 %; a factor from +200 % on: ×14."""
    if value >= 2.0:
        return f"×{factor(1.0 + value)}"
    digits = f"{abs(value) * 100:.{1 if abs(value) < 0.0995 else 0}f}"
    sign = "" if digits == "0.0" else "+" if value > 0 else "−"
    return f"{sign}{digits} %"


def duration_ms(value_ms: float) -> str:
    """Return milliseconds without their unit, with about three digits: 0.85, 9.4, 94.0, 3,446."""
    if value_ms < 1:
        return f"{value_ms:.2f}"
    return f"{value_ms:.1f}" if value_ms < 100 else f"{value_ms:,.0f}"


def duration(value_ms: float) -> str:
    """Return a time with its unit: 14 µs, 0.4 ms, 37 ms, 1.25 s, 17.5 min, 89.4 h."""
    if value_ms < 1:
        return f"{value_ms * 1e3:.0f} µs"
    if value_ms < 10:
        return f"{value_ms:.1f} ms"
    if value_ms < 1_000:
        return f"{value_ms:.0f} ms"
    if value_ms < 600_000:
        return f"{value_ms / 1e3:.3g} s"
    return f"{factor(value_ms / 60e3)} min" if value_ms < 7_200_000 else f"{factor(value_ms / 3.6e6)} h"


WHOLE_SHARE: Final = 0.9
"""Share of the requests from which on a number is of all of them, for a reader."""


def rests_on(known: int, of: int, lacking: str) -> str:
    """Return words on the requests that a number rests on: of 31 of 72 requests; empty from 90 % of them on."""
    return "" if known >= WHOLE_SHARE * of else f"of {known:,} of {of:,} requests: the others have no {lacking}"


NOTHING_CACHED = (
    "0 in all {} reports, though prompts repeat earlier ones; the prefix cache is off, or the engine reports a constant"
)
"""Reason to doubt hits; its number: requests that report them."""


def rounded_hits(hits: int, block_size: int) -> str:
    """Return a note on hits that end inside the trace's blocks, as those of a token-granular cache do."""
    return (
        f"{count(hits)} captured hits end inside blocks of {block_size} tokens: they are token-granular, and a replay "
        "rounds them down to blocks; a tap that knows the engine's page size records them to the token"
    )


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def listed(words: list[str]) -> str:
    """Return words as a sentence has them: a, b and c; ``unknown`` of none."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "unknown"
