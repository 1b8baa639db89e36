"""The run as it goes: one live line on a terminal, one line every 10 s elsewhere; both to stderr."""

import asyncio
import contextlib
import statistics
import sys
from collections.abc import AsyncIterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadgen.tally import Tally

LIVE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 10.0


def progress_line(tally: Tally, planned: int | None) -> str:
    """Where the run is: counts, and the latencies of the last few hundred requests."""
    of = "" if planned is None else f"/{planned}"
    parts = [f"sent {tally.started}{of}", f"in flight {tally.in_flight}", f"done {tally.statuses['ok']}"]
    parts.append(f"errors {tally.failed}")
    recent = sorted(tally.recent_ttft_ms)
    if recent:
        p99 = recent[min(len(recent) - 1, int(0.99 * len(recent)))]
        parts.append(f"TTFT p50 {statistics.median_low(recent):.1f} p99 {p99:.1f} ms")
    lag = sorted(tally.lag_ms[-100:])
    if lag:
        parts.append(f"lag {lag[len(lag) // 2]:.1f} ms")
    if tally.prompt_tokens:
        parts.append(f"cached {tally.cached_tokens / tally.prompt_tokens:.0%}")
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
