"""Wall-clock times of other people's traces, and the midnight that is their t = 0.

Lines come as requests end, so that the first line's request is not the first that arrived; midnight is before both,
and the same for every file of a day.
"""

from datetime import UTC, datetime
from typing import Any, Final

from tracefile.records.errors import InputError

DAY_NS: Final = 86_400 * 10**9
MOST_NS: Final = 2**63 - 1
"""Latest moment that a signed 64-bit count of nanoseconds tells: in the year 2262."""


def midnight_ns(unix_ns: int) -> int:
    """Return the beginning of a moment's day, UTC, in nanoseconds since 1970."""
    return unix_ns - unix_ns % DAY_NS


def iso_unix_ns(text: Any, where: str) -> int:
    """Nanoseconds since 1970 of ISO 8601, in UTC where it says no zone, to the microsecond; raises InputError."""
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InputError(f"{where}: {text!r}; expected a time as 2026-11-22T10:00:00Z") from None
    return checked_ns(round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1e6) * 1000, where)


def elapsed(start: float | None, end: float | None) -> float | None:
    """Return the time between two moments, in their unit; None if either is unknown, or the later came first."""
    return None if start is None or end is None or end < start else end - start


def checked_ns(unix_ns: float, where: str) -> int:
    """Return a moment in whole nanoseconds since 1970; raises InputError if it is before that or after 2262."""
    if not 0 <= unix_ns <= MOST_NS:
        raise InputError(f"{where}: a time before 1970 or after 2262; expected one between them")
    return round(unix_ns)
