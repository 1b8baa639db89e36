"""``sim watch``: does a latency model still hold for a trace, while it is written or afterwards? Minute by minute."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from measure import wording
from measure.table import table_lines
from measure.thresholds import BELOW_SATURATION, TOO_UNCERTAIN
from sim.vllm.config import add_engine_flags, engine_overrides
from tracefile import InputError, open_trace
from tracefile.commandline.ending import verdict_code
from tracefile.files.reading import FollowedTrace, wait_for_more
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    from sim.watch import modelwatch
    from sim.watch.modelwatch import Bounds, Judgement, ModelWatch, TtftRow
else:  # numpy, which the flags need not
    modelwatch = LateModule("sim.watch.modelwatch")

NICENESS = 15
POLL_S = 1.0
REST = 19.0
"""Pause after a judgement of a trace that is followed, in its CPU time: a twentieth of a core at most."""
NEAR = 1.01
"""A seen value so near to a forecast's interval is within it."""

EPILOG = "examples:\n  sim watch tap.jsonl.zst --latency-model model.json --follow --metrics 127.0.0.1:9105\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="the trace: a file, or the name of a trace in segments")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim fit")
    parser.add_argument(
        "--follow", action="store_true", help="go on as the trace grows, at low priority, until Ctrl-C (default: end)"
    )
    parser.add_argument("--upstream", metavar="URL", help="the engine to judge, of a trace of several")
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help="address of Prometheus gauges of the last judgement, as 127.0.0.1:9105"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object per judgement; words go to stderr")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Judge until the trace ends; 1 if the model has drifted by then, 3 if the last pace is too uncertain to say."""
    trace, overrides = arguments.trace, engine_overrides(arguments)
    watch = modelwatch.ModelWatch(trace, arguments.latency_model, overrides, arguments.upstream)
    last: Judgement | None = None
    shown = None if arguments.metrics is None else modelwatch.serve(arguments.metrics)
    if arguments.follow:
        os.nice(NICENESS)
        print(f"{trace}: followed until Ctrl-C", file=sys.stderr, flush=True)
    for last in (_followed if arguments.follow else _judgements)(watch, trace):
        if arguments.json:
            sys.stdout.write(msgspec.json.encode(last).decode() + "\n")
        print("\n".join(describe(last)), file=sys.stderr if arguments.json else None, flush=True)
        if shown is not None:
            shown.judgement = last
    return verdict_code(failed=last is not None and last.drifted, uncertain=last is not None and is_uncertain(last))


def is_uncertain(one: "Judgement") -> bool:
    """Return if the pace's own interval is wider than the range of drift, so that a drift of it would not show."""
    pace = one.pace
    return pace is None or (not one.outside and (pace.high or math.inf) / (pace.middle or 1.0) > one.allowed[1])


def _judgements(watch: "ModelWatch", path: Path) -> "Iterator[Judgement]":
    has_news = False
    with open_trace(path) as reader:
        for record in reader:
            watch.take(record, reader.latest_meta)
            has_news = not watch.is_due
            if watch.is_due:
                yield watch.judge()
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    if watch.is_empty:
        raise InputError(f"{path}: no request with an arrival and an end; expected a capture")
    if has_news:
        yield watch.judge()


def _followed(watch: "ModelWatch", path: Path) -> "Iterator[Judgement]":
    rest_s = 0.0
    trace = FollowedTrace(path)
    while True:
        for record in trace.new_records():
            assert trace.meta is not None
            watch.take(record, trace.meta)
        if watch.is_due and rest_s <= 0.0:
            begun_s = sum(os.times()[:2])
            yield watch.judge()
            rest_s = REST * (sum(os.times()[:2]) - begun_s)
        if not wait_for_more(POLL_S):
            return
        rest_s -= POLL_S


def describe(one: "Judgement") -> list[str]:
    """Return a judgement as lines: the pace, a table of TTFT, notes."""
    low, high = one.allowed
    lines = [
        f"{_clock(one, one.until_ms)}: {one.requests:,} requests since {_clock(one, one.from_ms)}; "
        f"pace {_interval(one.pace, '{:.2f}'.format)}, expected {low:.2f} to {high:.2f}"
    ]
    if one.ttft:
        lines += table_lines(["TTFT", "seen", "predicted", ""], [_cells(row) for row in one.ttft], "<>><")
    if one.drifted:
        since = _clock(one, one.drifted_since_ms or 0.0)
        lines.append(f"  the model has drifted since {since}; scale it (sim fit --pace-from) or fit it again")
    return lines + [f"  {note}" for note in one.notes]


def _cells(row: "TtftRow") -> list[str]:
    seen = wording.NOTHING if row.seen is None else wording.duration(row.seen)
    return [row.level, seen, _interval(row.predicted, wording.duration), _verdict(row)]


def _interval(bounds: "Bounds | None", text: Callable[[float], str]) -> str:
    if bounds is None:
        return wording.NOTHING
    ends = (bounds.middle, bounds.low, bounds.high)
    middle, low, high = (wording.NOTHING if value is None else text(value) for value in ends)
    return f"{middle} ({low} to {high})"


def _verdict(row: "TtftRow") -> str:
    low, high, middle = row.predicted.low, row.predicted.high or math.inf, row.predicted.middle
    if row.seen is None or low is None or middle is None:
        return ""
    if not low / NEAR <= row.seen <= high * NEAR:
        return "outside"
    return TOO_UNCERTAIN if (high - low) / 2.0 / middle > BELOW_SATURATION.get(row.level, math.inf) else "within"


def _clock(one: "Judgement", time_ms: float) -> str:
    """Return a time of the trace as HH:MM:SS UTC, or as seconds of the trace where its wall clock is not known."""
    if one.epoch_unix_ns is None:
        return f"{time_ms / 1e3:.0f} s"
    return datetime.fromtimestamp(one.epoch_unix_ns / 1e9 + time_ms / 1e3, UTC).strftime("%H:%M:%S UTC")
