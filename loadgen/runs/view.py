"""A run as people watch it: a live panel on a terminal, a progress line at an interval in a log, or both."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import TextIO

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadgen.runs.progress import RunProgress, ShardStatus, Status
from measure.tally import LATE_MS
from tracefile.commandline.console import CommandConsole
from tracefile.commandline.progress import clock

LIVE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 10.0
JSON_INTERVAL_S = 1.0
WIDE, MEDIUM = 80, 54
"""Least columns for three, or two, groups side by side."""

SHARDS_SHOWN = 8
SHORTFALL = 0.05
"""Share below the target rate that is shown as a lack."""

STEADY = 7
"""Least width of a number, so that others do not move while it grows."""

Row = tuple[str, Text]
Watch = Callable[[RunProgress], Coroutine[None, None, None]]


class View:
    """A status, drawn for whatever width there is."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self._status, options.max_width
        yield _headline(status)
        if status.planned:
            yield _bar(_ended(status) / status.planned, min(width, WIDE))
        counts, rates, waits = _count_rows(status), _rate_rows(status), _wait_rows(status)
        if width >= WIDE:
            yield _side_by_side([counts, rates, waits])
        elif width >= MEDIUM:
            yield _side_by_side([counts, rates])
            yield _side_by_side([waits])
        else:
            yield _side_by_side([counts + rates + waits])
        if len(status.shards) > 1:
            yield _shards_line(status)


def status_line(status: Status) -> str:
    of = "" if status.planned is None else f"/{status.planned}"
    parts = [clock(status.elapsed_s), f"sent {status.sent}{of}", f"in flight {status.in_flight}"]
    parts += [f"done {status.done}", f"errors {status.errors}", _rate_text(status)]
    parts += [f"{name} {text.plain}" for name, text in _wait_rows(status) if text.plain != "-"]
    if status.hit_rate is not None:
        parts.append(f"cached {status.hit_rate:.0%}")
    parts += [f"shard {index} silent for {shard.silent_s:.0f} s" for index, shard in _silent(status)]
    if status.remaining_s is not None:
        parts.append(f"{clock(status.remaining_s)} left")
    return " · ".join(parts)


def _headline(status: Status) -> Text:
    text = Text(clock(status.elapsed_s), style="bold", no_wrap=True, overflow="ellipsis")
    if status.planned is not None:
        text.append(f"  {_ended(status):,} of {status.planned:,} over", style="not bold")
    if status.remaining_s is not None:
        text.append(f"  {clock(status.remaining_s)} left", style="not bold")
    if status.stopping is not None:
        text.append(f"  {status.stopping}: recording what is in flight; once more leaves at once", style="yellow")
    return text


def _bar(share: float, width: int) -> Text:
    filled = round(min(1.0, share) * width)
    bar = Text("━" * filled, style="cyan", no_wrap=True)
    return bar.append("─" * (width - filled), style="dim")


def _ended(status: Status) -> int:
    return status.done + status.errors


def _count_rows(status: Status) -> list[Row]:
    return [
        ("sent", Text(f"{status.sent:,}")),
        ("in flight", Text(f"{status.in_flight:,}")),
        ("done", Text(f"{status.done:,}")),
        ("errors", Text(f"{status.errors:,}", style="bold red" if status.errors else "")),
    ]


def _rate_rows(status: Status) -> list[Row]:
    short = status.target_rate is not None and status.rate < (1 - SHORTFALL) * status.target_rate
    cached = "-" if status.hit_rate is None else f"{status.hit_rate:.1%}"
    return [
        ("rate", Text(_rate_text(status), style="yellow" if short else "")),
        ("output", Text(f"{status.output_tokens_per_s:,.0f} tokens/s")),
        ("cached", Text(cached)),
        ("queued", Text(f"{status.queued:,}")),
    ]


def _rate_text(status: Status) -> str:
    target = "" if status.target_rate is None else f" of {status.target_rate:.1f}"
    return f"{status.rate:.1f}{target}/s"


def _wait_rows(status: Status) -> list[Row]:
    late = status.lag_p99_ms is not None and status.lag_p99_ms > LATE_MS
    return [
        ("TTFT", _quantiles(status.ttft_p50_ms, status.ttft_p99_ms)),
        ("ITL", _quantiles(status.itl_p50_ms, status.itl_p99_ms)),
        ("lag", _quantiles(status.lag_p50_ms, status.lag_p99_ms, style="bold red" if late else "")),
    ]


def _quantiles(p50_ms: float | None, p99_ms: float | None, style: str = "") -> Text:
    if p50_ms is None or p99_ms is None:
        return Text("-")
    return Text(f"p50 {duration_ms(p50_ms)} p99 {duration_ms(p99_ms)} ms", style=style)


def duration_ms(value_ms: float) -> str:
    return f"{value_ms:,.2f}" if value_ms < 10 else f"{value_ms:,.1f}" if value_ms < 1000 else f"{value_ms:,.0f}"


def _side_by_side(groups: Sequence[Sequence[Row]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for group in groups:
        grid.add_column(style="dim", no_wrap=True, min_width=max(len(name) for name, _ in group))
        grid.add_column(no_wrap=True, overflow="ellipsis", min_width=STEADY)
    for line in range(max(map(len, groups))):
        cells = [group[line] if line < len(group) else ("", Text()) for group in groups]
        grid.add_row(*(part for cell in cells for part in cell))
    return grid


def _silent(status: Status) -> list[tuple[int, ShardStatus]]:
    return [(index, shard) for index, shard in enumerate(status.shards) if shard.silent_s is not None]


def _shards_line(status: Status) -> Text:
    text = Text("shards  ", style="dim", no_wrap=True, overflow="ellipsis")
    sent = "  ".join(f"{index}: {shard.sent:,}" for index, shard in enumerate(status.shards[:SHARDS_SHOWN]))
    more = len(status.shards) - SHARDS_SHOWN
    text.append(sent + (f"  and {more} more" if more > 0 else ""), style="default")
    for index, shard in _silent(status):
        text.append(f"  {index} silent for {shard.silent_s:.0f} s", style="bold red")
    return text


@contextlib.asynccontextmanager
async def watched(
    progress: RunProgress, json_file: TextIO | None, log_interval_s: float | None = None
) -> AsyncIterator[None]:
    """``log_interval_s``: between progress lines; 0: none; null: 10 s, and none beside the panel."""
    watches: list[Watch] = [] if json_file is None else [_writing(json_file)]
    if json_file is not sys.stderr:
        live = Live(console=CommandConsole(sys.stderr), auto_refresh=False, transient=True)
        terminal = sys.stderr.isatty()
        if terminal:
            watches.append(partial(_show_live, live))
        if interval_s := (0.0 if terminal else LINE_INTERVAL_S) if log_interval_s is None else log_interval_s:
            watches.append(partial(_show_lines, live.console, interval_s))
    tasks = [asyncio.create_task(watch(progress)) for watch in watches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, Exception):  # the run is worth more than its picture
                print(f"warning: the run's progress was not shown to its end: {error!r}", file=sys.stderr)


async def _show_live(live: Live, progress: RunProgress) -> None:

    with live:
        while True:
            live.update(View(progress.status()), refresh=True)
            await asyncio.sleep(LIVE_INTERVAL_S)


async def _show_lines(console: Console, interval_s: float, progress: RunProgress) -> None:
    while True:
        await asyncio.sleep(interval_s)
        console.out(status_line(progress.status()), highlight=False)  # above the panel, where there is one


def _writing(file: TextIO) -> Watch:
    async def write(progress: RunProgress) -> None:
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
