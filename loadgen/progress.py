"""The run as it goes: one live line on a terminal, one line every 10 s elsewhere; both to stderr."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadgen.tally import Tally

LIVE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 10.0


def progress_line(tally: Tally, planned: int | None) -> str:
    """Where the run is: counts and latencies so far."""
    of = "" if planned is None else f"/{planned}"
    parts = [f"sent {tally.started}{of}", f"in flight {tally.in_flight}", f"done {tally.statuses['ok']}"]
    parts.append(f"errors {tally.failed}")
    if tally.ttft_ms.count:
        parts.append(f"TTFT p50 {tally.ttft_ms.quantile(0.5):.1f} p99 {tally.ttft_ms.quantile(0.99):.1f} ms")
    if tally.lag_ms.count:
        parts.append(f"lag p99 {tally.lag_ms.quantile(0.99):.1f} ms")
    if tally.looked_up_tokens:
        parts.append(f"cached {tally.cached_tokens / tally.looked_up_tokens:.0%}")
    return " · ".join(parts)


@contextlib.asynccontextmanager
async def shown_progress(tally: Tally, planned: int | None) -> AsyncIterator[None]:
    """Show the run for the length of the ``async with`` block."""
    shown = asyncio.create_task(_show_live(tally, planned) if sys.stderr.isatty() else _show_lines(tally, planned))
    try:
        yield
    finally:
        shown.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await shown


async def _show_live(tally: Tally, planned: int | None) -> None:
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(Text(progress_line(tally, planned)), refresh=True)
            await asyncio.sleep(LIVE_INTERVAL_S)


async def _show_lines(tally: Tally, planned: int | None) -> None:
    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        print(progress_line(tally, planned), file=sys.stderr, flush=True)
