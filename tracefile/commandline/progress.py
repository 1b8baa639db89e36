"""Progress of long work: a live line on a terminal, a line every ten seconds in a log, nothing for short work."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.status import Status

Item = TypeVar("Item")

TERMINAL_INTERVAL_S = 1.0
LOG_INTERVAL_S = 10.0


def counted(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items; report ``what``, their count and, if the total is known, the remaining time on stderr."""
    from tracefile.commandline.console import CommandConsole  # noqa: PLC0415 - --help needs no rich

    console = CommandConsole(sys.stderr)
    interval_s = TERMINAL_INTERVAL_S if console.is_terminal else LOG_INTERVAL_S
    start_s = reported_s = time.monotonic()
    total = len(items) if isinstance(items, Sized) and len(items) < sys.maxsize else None
    live: Status | None = None
    with ExitStack() as stack:
        for count, item in enumerate(items, 1):
            yield item
            if time.monotonic() - reported_s < interval_s:
                continue
            reported_s = time.monotonic()
            line = progress_line(what, count, total, reported_s - start_s)
            if not console.is_terminal:
                print(line, file=sys.stderr, flush=True)
            elif live is None:
                live = stack.enter_context(console.status(line))
            else:
                live.update(line)


def progress_line(what: str, count: int, total: int | None, elapsed_s: float) -> str:
    """Return the count, with the remaining time at the current rate if the total is known."""
    if total is None:
        return f"{what}: {count:,}"
    if count == total:
        return f"{what}: all {count:,} in {clock(elapsed_s)}"
    return f"{what}: {count:,} of {total:,} · {clock((total - count) * elapsed_s / count)} left"


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds, or hours: 0:07, 1:00:00."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
