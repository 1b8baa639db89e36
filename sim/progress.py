"""How far long work has come: a bar on a terminal, a line every ten seconds otherwise, both on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

LINE_INTERVAL_S = 10.0
_UPDATE_EVERY = 64


@contextmanager
def show_progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Give a function to call once per finished piece, out of ``total``."""
    if sys.stderr.isatty():
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    yield _line_printer(what, total)


def _line_printer(what: str, total: int) -> Callable[[], None]:
    done = 0
    printed_s = time.monotonic()

    def count() -> None:
        nonlocal done, printed_s
        done += 1
        if done % _UPDATE_EVERY == 0 and time.monotonic() - printed_s >= LINE_INTERVAL_S:
            printed_s = time.monotonic()
            print(f"{what}: {done}/{total}", file=sys.stderr, flush=True)

    return count
