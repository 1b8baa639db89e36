"""Rolling fits: ``sim fit --window 1h``, a model for each window of time, in a folder with an index.

A window holds the requests that arrive in it. Requests in flight at its ends are in its schedule, too, and their tokens
tell nothing. The traces are read once, in order of time; a window is fitted when requests of the second window after it
come, so memory holds three windows.
"""

import hashlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import exp, floor
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from measure.cohorts import ALL
from measure.fitindex import INDEX, Estimate, FittedWindow, WindowErrors, read_windows, write_windows
from sim.fit.borrowing import Lender, read_lender
from sim.fit.fitting import FitConfig, Fitted, digests_of, fit_records
from sim.fit.pace import Pace, measure_pace
from sim.fit.residuals import Errors, cohort_errors
from sim.fit.variants import forecast
from sim.latency.modelfile import Model, Parameter, load_model, model_digest, save_model
from tracefile import InputError, Meta, Record, encode_record, open_trace

_CLOSED_AFTER = 2
"""Windows later, a request shows that one is over: what it holds was written by then."""


@dataclass(slots=True)
class Window:
    """Requests of a window of time, by trace."""

    number: int
    """Windows since the clock's zero."""
    records: dict[str, list[Record]] = field(default_factory=dict)
    before: dict[str, list[Record]] = field(default_factory=dict)
    """Earlier requests that were in flight when it began."""
    after: dict[str, list[Record]] = field(default_factory=dict)
    """Later requests that came while some of its own were in flight."""

    @property
    def requests(self) -> int:
        return sum(map(len, self.records.values()))


@dataclass(frozen=True, slots=True)
class Clock:
    """Windows on the wall clock, or on the clock of a trace that knows no other."""

    length_s: float
    is_wall: bool

    def number(self, meta: Meta, record: Record, path: str) -> int:
        if record.arrival_ms is None:
            raise InputError(f"{path}: request {record.request_id}: arrival_ms: missing; expected a time")
        zero_ms = (meta.epoch_unix_ns or 0) / 1e6 if self.is_wall else 0.0
        return floor((zero_ms + record.arrival_ms) / (1e3 * self.length_s))

    def name(self, number: int) -> str:
        begin_s = number * self.length_s
        if not self.is_wall:
            return f"t{begin_s:+g}s"
        return datetime.fromtimestamp(begin_s, UTC).isoformat().replace("+00:00", "Z")


class Windows:
    """Windows of traces, each yielded once it is over."""

    def __init__(self, paths: Sequence[Path], length_s: float) -> None:
        self.metas: dict[str, Meta] = {}
        self.late = 0
        """Requests whose window was yielded before they were read."""
        begins = [_begin(path) for path in paths]
        if any(epoch is None for epoch, _ in begins) and len(paths) > 1:
            raise InputError(f"{paths[0]}: a trace without a wall clock (meta.epoch_unix_ns); expected it alone")
        self.clock = Clock(length_s, begins[0][0] is not None)
        order = sorted(range(len(paths)), key=lambda place: (begins[place][0] or 0) / 1e6 + begins[place][1])
        self._paths = [str(paths[place]) for place in order]
        self._open: dict[int, Window] = {}
        self._yielded: int | None = None

    def __iter__(self) -> Iterator[Window]:
        for path in self._paths:
            with open_trace(path) as reader:
                self.metas[path] = reader.meta
                for record in reader:
                    number = self.clock.number(reader.meta, record, path)
                    if self._yielded is not None and number <= self._yielded:
                        self.late += 1
                        continue
                    self._open.setdefault(number, Window(number)).records.setdefault(path, []).append(record)
                    yield from self._over(number - _CLOSED_AFTER)
                for warning in reader.warnings:
                    print(f"warning: {warning}", file=sys.stderr)
        yield from self._over(max(self._open, default=0))

    def _over(self, last: int) -> Iterator[Window]:
        for number in sorted(self._open):
            if number > last:
                return
            window, following = self._open.pop(number), self._open.setdefault(number + 1, Window(number + 1))
            for path, records in window.records.items():
                every = [*window.before.get(path, []), *records]
                end_ms = max((record.end_ms() or 0.0 for record in records), default=0.0)
                edge_ms = self._edge_ms(path, number + 1)
                window.after[path] = [
                    one for one in following.records.get(path, []) if (one.arrival_ms or 0.0) < end_ms
                ]
                following.before[path] = [one for one in every if (one.end_ms() or 0.0) > edge_ms]
            if not following.requests:
                del self._open[number + 1]
                following = Window(number + 1)
            self._yielded = number
            yield window

    def _edge_ms(self, path: str, number: int) -> float:
        zero_ms = (self.metas[path].epoch_unix_ns or 0) / 1e6 if self.clock.is_wall else 0.0
        return number * self.clock.length_s * 1e3 - zero_ms


def _begin(path: Path) -> tuple[int | None, float]:
    with open_trace(path) as reader:
        first = next(iter(reader), None)
        return reader.meta.epoch_unix_ns, (first.arrival_ms or 0.0) if first is not None else 0.0


@dataclass(slots=True)
class Rolling:
    """Rolling fits into a folder: what is fitted so far."""

    config: FitConfig
    length_s: float
    lender: Lender | None
    known: dict[str, FittedWindow]
    """By name: windows of earlier runs, then of this one."""
    last: Model | None = None
    """Of the last fitted window."""
    done: int = 0

    @property
    def folder(self) -> Path:
        return self.config.output

    def take(self, window: Window, windows: Windows) -> FittedWindow:
        """Fit a window, or keep its fit of an earlier run, and write the index."""
        name = windows.clock.name(window.number)
        digest = self._digest(window, windows.metas)
        found = self.known.get(name)
        # A shipper may have taken segments away since: what was fitted on more stays.
        if found is None or (found.digest != digest and found.requests <= window.requests):
            found = self._fitted(name, digest, window, windows)
            self.known[name] = found
            write_windows(self.folder, sorted(self.known.values(), key=lambda one: one.begin_s))
        if found.model is not None:
            path = self.folder / found.model
            self.last = load_model(path)
            self.lender = self.lender or Lender(self.last, path.name)
        self.done += 1
        return found

    def _fitted(self, name: str, digest: str, window: Window, windows: Windows) -> FittedWindow:
        empty = FittedWindow(
            window=name,
            begin_s=window.number * self.length_s,
            length_s=self.length_s,
            status="skipped",
            reason=None,
            traces=[Path(path).name for path in window.records],
            requests=window.requests,
            digest=digest,
        )
        try:
            fitted = self._fit(window, windows.metas)
        except InputError as error:
            return msgspec.structs.replace(empty, reason=str(error))
        lender = self.lender or Lender(fitted.model, "this window")
        try:
            pace = fitted.pace or measure_pace(fitted.best.seen, lender.model, name)
        except InputError as error:
            return msgspec.structs.replace(empty, reason=str(error))
        model = f"model-{name.replace(':', '').replace('+', '')}.json"
        save_model(fitted.model, self.folder / model)
        return msgspec.structs.replace(
            empty,
            status="fitted",
            model=model,
            lender=model if self.lender is None else lender.name,
            lender_drift_log_sd=lender.model.drift_log_sd,
            pace=_pace(pace),
            parameters={name: _estimate(one) for name, one in fitted.model.parameters.items()},
            errors=dict(_errors(fitted, self.last, None if self.lender is None else lender.model)),
        )

    def _fit(self, window: Window, metas: Mapping[str, Meta]) -> Fitted:
        loaded, held_out = {}, {}
        for path, records in window.records.items():
            others = [*window.before.get(path, []), *window.after.get(path, [])]
            loaded[path] = metas[path], [*records, *others]
            held_out[Path(path)] = frozenset(range(len(records), len(records) + len(others)))
        config = replace(self.config, held_out=held_out)
        digests = [_lines_digest(records) for records in window.records.values()]
        return fit_records(config, loaded, digests, self.lender, io.StringIO() if self.done else None)

    def _digest(self, window: Window, metas: Mapping[str, Meta]) -> str:
        config, told = self.config, [str(metas[path].engine) for path in window.records]
        flags = (config.overrides, config.bootstrap, config.seed, config.cached, config.frontend, config.extra_terms)
        lender = "" if self.lender is None else model_digest(self.lender.model)
        facts = repr((self.length_s, sorted(flags[0].items()), flags[1:], lender, told))
        parts = [_lines_digest(records) for records in window.records.values()]
        return hashlib.sha256("\n".join([facts, *parts]).encode()).hexdigest()


def _lines_digest(records: Sequence[Record]) -> str:
    """``trace_digest`` of these records, as our writers write them."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(encode_record(record))
    return digest.hexdigest()


def _pace(pace: Pace) -> Estimate:
    return Estimate(
        value=pace.factor, low=pace.factor * exp(-pace.reach), high=pace.factor * exp(pace.reach), unit="× lender"
    )


def _estimate(one: Parameter) -> Estimate:
    state: Literal["identified", "borrowed", "open"] = "identified" if one.identified else "open"
    if one.borrowed:
        state = "borrowed"
    return Estimate(value=one.value, low=one.low, high=one.high, unit=one.unit, state=state)


def _errors(fitted: Fitted, last: Model | None, lender: Model | None) -> Iterator[tuple[str, WindowErrors]]:
    """Yield errors on a window: of the model of the window before, of the lender, and of its own in sample."""
    for name, model in (("before", last), ("lender", lender)):
        if model is not None:
            requests = forecast(fitted.captures, np.array(model.costs), fitted.best.variant)
            yield from ((name, one) for one in _all_requests(cohort_errors(requests)))
    yield from (("own", one) for one in _all_requests(cohort_errors(fitted.requests)))


def _all_requests(errors: Sequence[Errors]) -> Iterator[WindowErrors]:
    for one in errors:
        if one.cohort == ALL:
            yield WindowErrors(p50=one.p50, p90=one.p90, median_abs=one.median_abs)


def fit_windows(config: FitConfig, length_s: float) -> int:
    """Fit every window into the folder ``config.output``; 130 after Ctrl-C, and the same call continues."""
    if length_s <= 0.0:
        raise InputError("--window: 0; expected a duration such as 1h")
    if config.cached != "factual":
        raise InputError(
            f"--cached {config.cached}: expected factual with --window: no window knows the pool before it"
        )
    if len(config.traces) > 1:
        digests_of(config.traces)  # refuses one given twice
    known = {window.window: window for window in _open_folder(config.output)}
    if others := {window.length_s for window in known.values()} - {length_s}:
        raise InputError(
            f"--window: {length_s:g} s; {config.output} holds windows of {min(others):g} s: expected that length, or "
            "another folder"
        )
    lender = None if config.borrow_from is None else read_lender(config.borrow_from)
    rolling = Rolling(config, length_s, lender, known)
    windows = Windows(config.traces, length_s)
    try:
        for window in windows:
            print(describe_window(rolling.take(window, windows)), flush=True)
    except KeyboardInterrupt:
        print(f"sim fit: interrupted; {rolling.done} windows are in {config.output}, the same command continues")
        return 130
    if windows.late:
        print(
            f"warning: {windows.late} requests came after their window was fitted; expected traces in order of time",
            file=sys.stderr,
        )
    fitted = sum(window.status == "fitted" for window in known.values())
    print(f"{config.output / INDEX}: {len(known)} windows, {fitted} fitted; next: report drift {config.output}")
    return 0


def _open_folder(folder: Path) -> list[FittedWindow]:
    if (folder / INDEX).is_file():
        return read_windows(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"--output {folder}: a folder of other files; expected a new one, or one with {INDEX}")
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror}; expected a folder to write") from error
    return []


def describe_window(window: FittedWindow) -> str:
    told = f"{window.window}: {window.requests:,} requests"
    if window.status == "skipped" or window.pace is None:
        return f"{told}: skipped: {window.reason}"
    borrowed = [name for name, one in window.parameters.items() if one.state == "borrowed"]
    error = window.errors.get("before")
    said = "" if error is None else f", TTFT of the model before it off by {error.median_abs:.1%} at the median"
    lent = f"; borrowed: {', '.join(borrowed)}" if borrowed else ""
    return f"{told}: pace {window.pace.value:.3f}{said}{lent}"
