"""Whoever watches a run: people on a terminal four times a second, in a log every ten; a program once a second.

Nothing of it is on stdout, which holds the summary alone.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TextIO

import msgspec

from loadgen.runs.progress import RunProgress
from tracefile import InputError

LIVE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 10.0
JSON_INTERVAL_S = 1.0
STDERR = "-"
"""For ``--json-progress``: stderr, in place of what people read there."""

Watch = Callable[[RunProgress], Coroutine[None, None, None]]


@contextlib.asynccontextmanager
async def watched(progress: RunProgress, json_file: TextIO | None) -> AsyncIterator[None]:
    """Show the run for the length of the ``async with`` block."""
    watches: list[Watch] = [] if json_file is None else [_writing(json_file)]
    if json_file is not sys.stderr:
        watches.append(_show_live if sys.stderr.isatty() else _show_lines)
    tasks = [asyncio.create_task(watch(progress)) for watch in watches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, Exception):  # the run is worth more than its picture
                print(f"warning: the run's progress was not shown to its end: {error!r}", file=sys.stderr)


@contextlib.contextmanager
def opened(path: str | None) -> Iterator[TextIO | None]:
    """The file of ``--json-progress``; null: there is none. Raises InputError if it cannot be had."""
    if path is None or path == STDERR:
        yield None if path is None else sys.stderr
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise InputError(
            f"--json-progress: {path}: {error.strerror or error}; expected a file to write, or {STDERR}"
        ) from error
    with file:
        yield file


async def _show_live(progress: RunProgress) -> None:
    # Loaded while the shards are at work: it takes longer than all of the run's other beginnings.
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from loadgen.runs.view import View  # noqa: PLC0415

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            live.update(View(progress.status()), refresh=True)
            await asyncio.sleep(LIVE_INTERVAL_S)


async def _show_lines(progress: RunProgress) -> None:
    from loadgen.runs.view import status_line  # noqa: PLC0415 - as above

    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        print(status_line(progress.status()), file=sys.stderr, flush=True)


def _writing(file: TextIO) -> Watch:
    async def write(progress: RunProgress) -> None:
        """One object a second, and one at the end, which has the run's final counts."""
        try:
            while True:
                await asyncio.sleep(JSON_INTERVAL_S)
                _write(file, progress)
        finally:
            _write(file, progress)

    return write


def _write(file: TextIO, progress: RunProgress) -> None:
    file.write(msgspec.json.encode(progress.status()).decode() + "\n")
    file.flush()
