"""Long work says how far it is: a live line on a terminal, one every ten seconds in a log; short work says nothing."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TypeVar

from rich.console import Console
from rich.status import Status

Item = TypeVar("Item")

TERMINAL_INTERVAL_S = 1.0
LOG_INTERVAL_S = 10.0


def counted(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, with ``what`` and their number on stderr while they pass."""
    console = Console(stderr=True)
    interval_s = TERMINAL_INTERVAL_S if console.is_terminal else LOG_INTERVAL_S
    said_s = time.monotonic()
    live: Status | None = None
    with ExitStack() as stack:
        for count, item in enumerate(items, 1):
            yield item
            if time.monotonic() - said_s < interval_s:
                continue
            said_s = time.monotonic()
            if not console.is_terminal:
                print(f"{what}: {count:,}", file=sys.stderr, flush=True)
            elif live is None:
                live = stack.enter_context(console.status(f"{what}: {count:,}"))
            else:
                live.update(f"{what}: {count:,}")
