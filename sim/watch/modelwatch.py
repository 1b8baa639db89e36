"""A model beside a trace: takes its requests one by one, judges the last minutes, and tells when the model drifted."""

import os
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from measure.modelstate import CacheRow, ModelState, TtftRow
from sim.fit.pace import Pace, with_pace
from sim.forecast.captured import captured_engine
from sim.latency.modelfile import Model, engine_with, load_model
from sim.latency.verdicts import engine_warning
from sim.vllm.config import EngineConfig
from sim.vllm.settings import refuse_other_attention
from sim.watch.judgement import (
    DriftAlarm,
    EngineLoad,
    Slices,
    allowed_reach,
    cache_rows,
    drawn_models,
    engine_load,
    forecast_loads,
    is_outside,
    live_pace,
    slice_begin,
    slice_steps,
    ttft_rows,
)
from sim.watch.window import CacheSizes, Kept, Window, cache_sizes
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

MOST_MISSING = 0.05
"""Share of requests in flight that the trace may lack before a note tells it."""
MOST_ENGINES = 16
"""Upstreams with an order of use of their own; requests of others are left out."""


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """Settings of ``sim watch``."""

    trace: Path
    model: Path
    overrides: dict[str, Any]
    window_ms: float
    every_ms: float
    members: int
    seed: int


class ModelWatch:
    """Times are the trace's own: the same trace gives the same judgements."""

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._notes: list[str] = []
        self._stamp: object = _stamp(config.model)
        self._fitted = load_model(config.model)
        self._meta: Meta | None = None
        self.alarm = DriftAlarm()
        self._paces: list[tuple[float, float]] = []
        self._has_judged = False
        self._judged_ms: float | None = None
        self._begin(Meta(source="tap"))

    def take(self, record: Record, meta: Meta) -> None:
        """Take the next request to end; another engine in the header begins anew. Raises InputError."""
        if self._meta is None or meta.engine != self._meta.engine:
            refuse_other_attention(meta, self._config.trace)
            self._begin(meta)
            self._meta = meta
        end_ms = record.end_ms()
        if record.arrival_ms is None or end_ms is None:
            return
        self._window.take(Kept(record, end_ms, self._hits(record)))
        if self._judged_ms is None:
            self._judged_ms = end_ms

    @property
    def is_empty(self) -> bool:
        """True until a request with an arrival and an end comes."""
        return self._judged_ms is None

    @property
    def is_due(self) -> bool:
        """True once the trace has gone on by ``every_ms`` since the last judgement."""
        return self._judged_ms is not None and self._window.latest_ms >= self._judged_ms + self._config.every_ms

    @property
    def has_news(self) -> bool:
        """True if a request has ended since the last judgement, or there was none."""
        return not self._has_judged or self._window.latest_ms > (self._judged_ms or 0.0)

    def judge(self) -> ModelState:
        """Judge the requests of the window up to the time by which all that arrived have ended."""
        self._refresh_model()
        self._judged_ms, self._has_judged = self._window.latest_ms, True
        until_ms = self._window.known_until_ms
        begin_ms = max(self._window.begin_ms, until_ms - self._config.window_ms)
        model = self._current_model()
        self._notes = list(self._standing_notes(model))
        loads = self._loads(model.engine, begin_ms, until_ms)
        if not loads or not self._know_hits(loads):
            return self._state([], begin_ms, until_ms)
        if (missing := _missing_share(loads)) > MOST_MISSING:
            self._notes.append(
                f"{missing:.0%} of requests in flight are not in the trace (sampled?): the pace is too high"
            )
        pace = self._pace(model, loads, begin_ms, until_ms)
        if any(load.judged.any() for load in loads):
            ttft, caches = self._forecasts(model, loads, pace)
        else:
            ttft, caches = [], []
            self._notes.append("TTFT: no streamed request arrived and ended in the time that is kept")
        said = None if pace is None else live_pace(pace, allowed_reach(model))
        state = self._state(loads, begin_ms, until_ms)
        return msgspec.structs.replace(state, pace=said, ttft=ttft, caches=caches)

    def _begin(self, meta: Meta) -> None:
        self._window = Window(self._config.window_ms)
        self._slices = Slices(self._config.window_ms)
        self._sizes: dict[str | None, CacheSizes] = {}
        self._left_out = 0
        self._judged_ms = None
        self._paced_until_ms = -np.inf
        engine = meta.engine
        known = self._config.overrides.get("num_gpu_blocks") or (engine and engine.num_gpu_blocks)
        self._first_sizes = cache_sizes(meta, self._engine(meta, []), size_known=bool(known))

    def _engine(self, meta: Meta, records: list[Record]) -> EngineConfig:
        return engine_with(captured_engine(self._fitted.engine, meta, records), self._config.overrides)

    def _hits(self, record: Record) -> Any:
        if isinstance(self._first_sizes, str) or record.block_hashes is None or not record.prompt_tokens:
            return None
        assert self._meta is not None
        if record.upstream not in self._sizes:
            if len(self._sizes) == MOST_ENGINES:
                self._left_out += 1
                return None
            self._sizes[record.upstream] = CacheSizes(self._meta, self._engine(self._meta, []))
        return self._sizes[record.upstream].take(record)

    def _current_model(self) -> Model:
        assert self._meta is not None
        records = [one.record for one in self._window]
        return msgspec.structs.replace(self._fitted, engine=self._engine(self._meta, records))

    def _loads(self, engine: EngineConfig, begin_ms: float, until_ms: float) -> list[EngineLoad]:
        assert self._meta is not None
        by_engine: dict[str | None, list[Kept]] = {}
        for one in sorted(self._window, key=attrgetter("arrival_ms")):
            if one.arrival_ms < until_ms and one.end_ms > begin_ms:
                by_engine.setdefault(one.record.upstream, []).append(one)
        several = [upstream for upstream in by_engine if upstream is not None]
        if len(several) > 1:
            by_engine.pop(None, None)  # refused by the tap itself, for want of an engine
            self._notes.append(f"{len(several)} engines, each by its own requests; settings as of one")
        return [engine_load(self._meta, kept, engine, begin_ms) for kept in by_engine.values()]

    def _know_hits(self, loads: list[EngineLoad]) -> bool:
        served = [one for load in loads for one in load.kept if one.record.ttft_ms is not None]
        reported = sum(one.record.cached_tokens is not None for one in served)
        if 2 * reported >= len(served):
            return True
        if isinstance(self._first_sizes, str):
            said = "cached tokens: most records have none, nor is the cache's size known; nothing is judged (vLLM: "
            self._notes.append(f"{said}--enable-prompt-tokens-details; streams: tap --inject usage)")
            return False
        self._notes.append("cached tokens: most records have none; taken from block hashes, at the cache's size")
        return True

    def _pace(self, model: Model, loads: list[EngineLoad], begin_ms: float, until_ms: float) -> Pace | None:
        assert self._meta is not None
        since_ms = max(begin_ms, self._paced_until_ms)
        kept = [one for load in loads for one in load.kept]
        first_ms = min(one.arrival_ms for one in kept)
        since_ms = slice_begin(kept, max(since_ms, first_ms), until_ms)
        if until_ms > since_ms:
            for load in loads:
                met = [place for place, one in enumerate(load.kept) if one.end_ms > since_ms]
                records = [load.kept[place].record for place in met]
                cached = load.cached_tokens[met].tolist()
                seen = slice_steps(self._meta, records, cached, model, (since_ms, until_ms))
                self._slices.add(until_ms, seen)
            self._paced_until_ms = until_ms
        try:
            pace = self._slices.pace(model)
        except InputError as error:
            self._notes.append(str(error))
            return None
        self._paces = [(at_ms, factor) for at_ms, factor in self._paces if at_ms > until_ms - self._config.window_ms]
        self._paces.append((until_ms, round(pace.factor, 4)))
        self.alarm.judge(outside=is_outside(pace, allowed_reach(model)), at_ms=until_ms)
        return pace

    def _forecasts(
        self, model: Model, loads: list[EngineLoad], pace: Pace | None
    ) -> tuple[list[TtftRow], list[CacheRow]]:
        assert self._meta is not None
        config, engine = self._config, model.engine
        models, beyond = drawn_models(loads, engine, model, config.members, config.seed)
        self._notes += beyond
        cached = [load.cached_tokens for load in loads]
        by_model = forecast_loads(loads, cached, engine, models, config.seed)
        at_pace = None
        if pace is not None:
            models, _ = drawn_models(loads, engine, with_pace(model, pace), config.members, config.seed)
            at_pace = forecast_loads(loads, cached, engine, models, config.seed)
        rows = ttft_rows(self._meta, loads, by_model, at_pace)
        if isinstance(self._first_sizes, str):
            self._notes.append(self._first_sizes)
            return rows, []
        if self._first_sizes.counted_in != engine.block_size:
            self._notes.append(f"hits at other cache sizes are counted in blocks of {self._first_sizes.counted_in}")
        return rows, list(cache_rows(loads, self._first_sizes, engine, models, config.seed))

    def _refresh_model(self) -> None:
        """Read the model's file again where it is another one; one that is gone or bad is told, the last one stays."""
        stamp = _stamp(self._config.model)
        if stamp == self._stamp:
            return
        try:
            self._fitted = load_model(self._config.model)
        except InputError:
            return
        self._stamp, self.alarm, self._paces = stamp, DriftAlarm(), []
        self._slices, self._paced_until_ms = Slices(self._config.window_ms), -np.inf

    def _standing_notes(self, model: Model) -> list[str]:
        assert self._meta is not None
        notes = list(engine_warning(self._fitted, self._meta, model.engine))
        if self._stamp != _stamp(self._config.model):
            notes.append(f"{self._config.model.name}: cannot be read any more; the one read before is still used")
        if self._window.is_short:
            span_s = (self._window.latest_ms - self._window.begin_ms) / 1e3
            notes.append(f"traffic beyond what is kept: the last {span_s:,.0f} s, all sessions of it")
        if self._left_out:
            notes.append(f"more than {MOST_ENGINES} upstreams: {self._left_out:,} requests of the others left out")
        return notes

    def _state(self, loads: list[EngineLoad], begin_ms: float, until_ms: float) -> ModelState:
        model, epoch_ns = self._fitted, None if self._meta is None else self._meta.epoch_unix_ns
        reach = allowed_reach(model)
        judged = sum(int(load.judged.sum()) for load in loads)
        return ModelState(
            model=self._config.model.name,
            allowed=(round(float(np.exp(-reach)), 4), round(float(np.exp(reach)), 4)),
            judged_unix_s=None if epoch_ns is None else round(epoch_ns / 1e9 + until_ms / 1e3, 6),
            from_ms=_first_ms(loads, begin_ms),
            until_ms=round(until_ms, 3),
            requests=judged,
            reported_hit_rate=_reported_hit_rate(loads),
            paces=self._paces,
            drifted=self.alarm.drifted,
            drifted_since_ms=self.alarm.since_ms,
            notes=self._notes,
        )


def _missing_share(loads: list[EngineLoad]) -> float:
    """Return the share of requests in flight at judged arrivals, by the writer's count, that the trace lacks."""
    kept = [one for load in loads for one in load.kept]
    arrivals_ms, ends_ms = np.sort([one.arrival_ms for one in kept]), np.sort([one.end_ms for one in kept])
    judged = [
        one for load in loads for one, is_judged in zip(load.kept, load.judged.tolist(), strict=True) if is_judged
    ]
    told = [(one.arrival_ms, one.record.concurrency) for one in judged if one.record.concurrency]
    at_ms, counted = np.array([at for at, _ in told]), sum(count for _, count in told)
    known = np.searchsorted(arrivals_ms, at_ms, side="right") - np.searchsorted(ends_ms, at_ms, side="right")
    return 1.0 - float(known.sum()) / counted if counted else 0.0


def _first_ms(loads: list[EngineLoad], begin_ms: float) -> float | None:
    first_ms = min((float(load.arrivals.arrival_ms.min()) for load in loads), default=np.inf)
    return round(max(begin_ms, first_ms), 3) if np.isfinite(first_ms) else None


def _reported_hit_rate(loads: list[EngineLoad]) -> float | None:
    told = [
        (one.record.cached_tokens, one.record.prompt_tokens or 0)
        for load in loads
        for one, judged in zip(load.kept, load.judged.tolist(), strict=True)
        if judged and one.record.cached_tokens is not None
    ]
    prompts = sum(prompt for _, prompt in told)
    return round(sum(cached for cached, _ in told) / prompts, 5) if prompts else None


def _stamp(path: Path) -> object:
    """Return what changes when a file is replaced; None: it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
