"""Requests whose reported cached tokens are not those of the rules, and their table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from measure.table import table_lines

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose two counts differ."""

    request_id: str
    reported: int
    predicted: int | None
    """None: the rules never admit it."""
    preemptions: int
    cause: str


def difference_lines(differences: Sequence[Difference]) -> list[str]:
    """Return a table of the first differences, and the causes of the others; nothing if there are none."""
    if not differences:
        return []
    rows = [
        [one.request_id[:32], f"{one.reported:,}", f"{one.predicted or 0:,}", one.cause] for one in differences[:_SHOWN]
    ]
    more = Counter(one.cause for one in differences[_SHOWN:])
    return [
        *table_lines(["request", "reported", "rules", "cause"], rows, "<>><"),
        *(f"and {count} more: {cause}" for cause, count in more.most_common()),
    ]
