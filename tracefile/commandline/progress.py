"""Long work says how far it is: a live line on a terminal, one every ten seconds in a log; short work says nothing."""

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
    """Yield the items, with ``what``, their number and, if there is an end, the time left on stderr while they pass."""
    from tracefile.commandline.console import CommandConsole  # noqa: PLC0415 - --help needs no rich

    console = CommandConsole(sys.stderr)
    interval_s = TERMINAL_INTERVAL_S if console.is_terminal else LOG_INTERVAL_S
    begun_s = said_s = time.monotonic()
    total = len(items) if isinstance(items, Sized) and len(items) < sys.maxsize else None
    live: Status | None = None
    with ExitStack() as stack:
        for count, item in enumerate(items, 1):
            yield item
            if time.monotonic() - said_s < interval_s:
                continue
            said_s = time.monotonic()
            line = progress_line(what, count, total, said_s - begun_s)
            if not console.is_terminal:
                print(line, file=sys.stderr, flush=True)
            elif live is None:
                live = stack.enter_context(console.status(line))
            else:
                live.update(line)


def progress_line(what: str, count: int, total: int | None, elapsed_s: float) -> str:
    """Return the count, and where the total is known the time left at the pace so far; of all, the time they took."""
    if total is None:
        return f"{what}: {count:,}"
    if count == total:
        return f"{what}: all {count:,} in {clock(elapsed_s)}"
    return f"{what}: {count:,} of {total:,} · {clock((total - count) * elapsed_s / count)} left"


def clock(seconds: float) -> str:
    """Return minutes and seconds, hours where there are any: 0:07, 1:00:00."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
