"""Display of a run: a live panel on a terminal, elsewhere a progress line every 10 s; throughput, TTFT, ITL."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadgen.runs.progress import Quantiles, RunProgress, Status
from measure.live_counts import LATE_MS
from tracefile.commandline.console import CommandConsole
from tracefile.commandline.progress import clock

LIVE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 10.0
WIDE, MEDIUM = 80, 54
"""Minimum columns for three, or two, groups side by side."""

STEADY = 7
"""Minimum width of a number, so that columns do not move while it grows."""

Row = tuple[str, Text]


class View:
    """Panel of a status (counts, throughput, latency quantiles), drawn for the available width."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self._status, options.max_width
        yield _headline(status)
        if status.planned:
            yield _bar(status.counts.ended / status.planned, min(width, WIDE))
        counts, rates, latencies = _count_rows(status), _rate_rows(status), _latency_rows(status)
        if width >= WIDE:
            yield _side_by_side([counts, rates, latencies])
        elif width >= MEDIUM:
            yield _side_by_side([counts, rates])
            yield _side_by_side([latencies])
        else:
            yield _side_by_side([counts + rates + latencies])


def status_line(status: Status) -> str:
    counts = status.counts
    of = "" if status.planned is None else f"/{status.planned}"
    parts = [clock(status.elapsed_s), f"sent {counts.started}{of}", f"in flight {counts.in_flight}"]
    parts += [f"done {counts.statuses['ok']}", f"errors {counts.failed}", f"{status.rate:.1f}/s"]
    parts += [f"{name} {text.plain}" for name, text in _latency_rows(status) if text.plain != "-"]
    if status.hit_rate is not None:
        parts.append(f"cached {status.hit_rate:.0%}")
    if status.remaining_s is not None:
        parts.append(f"{clock(status.remaining_s)} left")
    return " · ".join(parts)


def _headline(status: Status) -> Text:
    text = Text(clock(status.elapsed_s), style="bold", no_wrap=True, overflow="ellipsis")
    if status.planned is not None:
        text.append(f"  {status.counts.ended:,} of {status.planned:,} over", style="not bold")
    if status.remaining_s is not None:
        text.append(f"  {clock(status.remaining_s)} left", style="not bold")
    if status.stopping is not None:
        text.append(f"  {status.stopping}: recording requests in flight; again to quit at once", style="yellow")
    return text


def _bar(share: float, width: int) -> Text:
    filled = round(min(1.0, share) * width)
    bar = Text("━" * filled, style="cyan", no_wrap=True)
    return bar.append("─" * (width - filled), style="dim")


def _count_rows(status: Status) -> list[Row]:
    counts = status.counts
    return [
        ("sent", Text(f"{counts.started:,}")),
        ("in flight", Text(f"{counts.in_flight:,}")),
        ("done", Text(f"{counts.statuses['ok']:,}")),
        ("errors", Text(f"{counts.failed:,}", style="bold red" if counts.failed else "")),
    ]


def _rate_rows(status: Status) -> list[Row]:
    return [
        ("rate", Text(f"{status.rate:.1f}/s")),
        ("output", Text(f"{status.output_tokens_per_s:,.0f} tokens/s")),
        ("cached", Text("-" if status.hit_rate is None else f"{status.hit_rate:.1%}")),
        ("queued", Text(f"{status.counts.held:,}")),
    ]


def _latency_rows(status: Status) -> list[Row]:
    late = status.lag is not None and status.lag[1] > LATE_MS
    return [
        ("TTFT", _quantiles(status.ttft)),
        ("ITL", _quantiles(status.itl)),
        ("lag", _quantiles(status.lag, style="bold red" if late else "")),
    ]


def _quantiles(values: Quantiles, style: str = "") -> Text:
    if values is None:
        return Text("-")
    p50, p99 = map(duration_ms, values)
    return Text(f"p50 {p50} p99 {p99} ms", style=style)


def duration_ms(value_ms: float) -> str:
    return f"{value_ms:,.2f}" if value_ms < 10 else f"{value_ms:,.1f}" if value_ms < 1000 else f"{value_ms:,.0f}"


def _side_by_side(groups: Sequence[Sequence[Row]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for group in groups:
        grid.add_column(style="dim", no_wrap=True, min_width=max(len(name) for name, _ in group))
        grid.add_column(no_wrap=True, overflow="ellipsis", min_width=STEADY)
    for line in range(max(map(len, groups))):
        cells = [group[line] if line < len(group) else ("", Text()) for group in groups]
        grid.add_row(*(text for cell in cells for text in cell))
    return grid


@contextlib.asynccontextmanager
async def watched(progress: RunProgress) -> AsyncIterator[None]:
    """Show the run's progress on stderr, in the background."""
    task = asyncio.create_task(_show_live(progress) if sys.stderr.isatty() else _show_lines(progress))
    try:
        yield
    finally:
        task.cancel()
        for error in await asyncio.gather(task, return_exceptions=True):
            if isinstance(error, Exception):  # a broken display must not end the run
                print(f"warning: progress display stopped: {error!r}", file=sys.stderr)


async def _show_live(progress: RunProgress) -> None:
    with Live(console=CommandConsole(sys.stderr), auto_refresh=False, transient=True) as live:
        while True:
            live.update(View(progress.status()), refresh=True)
            await asyncio.sleep(LIVE_INTERVAL_S)


async def _show_lines(progress: RunProgress) -> None:
    console = CommandConsole(sys.stderr)
    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        console.out(status_line(progress.status()), highlight=False)
