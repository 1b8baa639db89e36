"""Runs of a sweep one after another: engine made ready, load sent, result kept in the index."""

import fcntl
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engines.control import ControlClient, reset_prefix_cache
from engines.dialect import Dialect
from engines.readiness import page_notes, readiness_notes, readiness_of, target_words
from engines.recognition import dialect_notes, find_dialect, recognition_notes
from loadgen.core.bodies import cache_probe
from loadgen.core.request import origin_of
from loadgen.loadrun import send_load
from loadgen.plan.config import ONE_TURN, LoadConfig
from loadgen.runs.driving import announce
from loadgen.runs.outcome import INTERRUPTED, exit_code
from loadgen.runs.summary import Ending
from loadgen.sweepplan import PROG, PlannedRun, SweepPlan
from measure.metrics.results import TraceMetrics
from measure.metrics.statistics import statistic
from measure.sweepindex import INDEX, SweepRun, read_sweep, write_sweep
from measure.wording import duration_ms, rate
from tracefile import InputError

IDLE_WAIT_S = 60.0
IDLE_POLL_S = 0.2
WARM_UP_PARALLEL = 4
TURN = "~"
"""Between the sweep's nonce and the number of a run with tokens of its own."""
BEGUN = "begun, and not ended"
SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class Target:
    """Engine behind a label."""

    model: str
    dialect: Dialect
    resets: bool
    """True if its cache can be reset before each run."""
    block_size: int | None
    notes: tuple[str, ...]
    """Told at the beginning, and not after each run."""


def _command_of(entry: SweepRun) -> tuple[str, str]:
    """Return a run's command without its nonce, and the nonce."""
    *words, _, nonce = shlex.split(entry.command)
    return shlex.join(words), nonce


def run_sweep(plan: SweepPlan) -> int:
    """Make the runs that are missing; 1 if one failed or missed an SLO, 130 if interrupted."""
    with opened(plan) as kept:
        sweep = Sweep(plan, kept)
        try:
            return sweep.run()
        except KeyboardInterrupt:
            sweep.keep_interrupted()
            tell(f"interrupted; to go on: {plan.command}")
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def opened(plan: SweepPlan) -> Iterator[list[SweepRun]]:
    """Give the runs that the folder has, while no other sweep has it; raises InputError if it is not this sweep's."""
    folder = plan.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror}; expected a folder to write in") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--output {folder}: another sweep writes in it; expected another folder") from None
        yield _kept(plan)
    finally:
        os.close(fd)
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _kept(plan: SweepPlan) -> list[SweepRun]:
    """Return the runs of the folder's index. Raises InputError for one that this sweep would not make."""
    folder = plan.folder
    if not (folder / INDEX).exists():
        if any(folder.iterdir()):
            raise InputError(f"--output {folder}: has other files and no {INDEX}; expected a new folder, or a sweep's")
        return []
    commands = {run.name: shlex.join(["loadgen", *run.argv]) for run in plan.runs}
    kept = read_sweep(folder)
    for entry in kept:
        if commands.get(entry.run) != _command_of(entry)[0]:
            raise InputError(f"--output {folder}: has run {entry.run} of {entry.command}; expected another folder")
    return kept


class Sweep:
    """Sweep from its first run to its last."""

    def __init__(self, plan: SweepPlan, kept: Sequence[SweepRun]) -> None:
        self._plan = plan
        self._entries = {entry.run: entry for entry in kept}
        self._targets: dict[str, Target] = {}
        earlier = [_command_of(entry)[1] for entry in kept]
        self._nonce = earlier[0].partition(TURN)[0] if earlier else secrets.token_hex(8)
        self._cold = any(TURN in nonce for nonce in earlier)
        """True if every run sends other tokens: for all labels, so that each gets the same load."""
        self._missed = False
        self._told: set[str] = set()

    def run(self) -> int:
        """Make every run that is not done; return the exit code."""
        plan = self._plan
        to_do = [run for run in plan.runs if not self._is_done(run)]
        self._find_targets(to_do)
        for number, run in enumerate(plan.runs, 1):
            if run in to_do:
                tell(f"run {number} of {len(plan.runs)}, {run.words()}")
                self._make(run, number)
        failed = [entry for entry in self._entries.values() if entry.status != "done"]
        print(f"{len(plan.runs) - len(failed)} of {len(plan.runs)} runs are done; to compare them:")
        print(f"report show {shlex.quote(str(plan.folder))} --html sweep.html")
        for entry in failed:
            print(f"{entry.run}: {entry.status.upper()}: {entry.reason}")
        return int(bool(failed) or self._missed)

    def keep_interrupted(self) -> None:
        """Record that a signal ended the run in hand."""
        for entry in self._entries.values():
            if entry.reason == BEGUN:
                self._keep(msgspec.structs.replace(entry, reason="interrupted"))
                return

    def _is_done(self, run: PlannedRun) -> bool:
        entry = self._entries.get(run.name)
        return entry is not None and entry.status == "done" and (self._plan.folder / entry.trace).exists()

    def _find_targets(self, to_do: Sequence[PlannedRun]) -> None:
        """Ask each label's engine, before anything is sent."""
        for label in self._plan.labels:
            run = next((run for run in to_do if run.label == label), None)
            if run is not None:
                self._targets[label] = find_target(run)
        cold = [label for label, target in self._targets.items() if not target.resets]
        self._cold = self._cold or bool(cold)
        if cold:
            tell(f"note: {', '.join(cold)}: no cache reset, so every run sends other tokens, in the same lengths")

    def _make(self, run: PlannedRun, number: int) -> None:
        """Make one run, and keep in the index how it ended. Raises KeyboardInterrupt if a signal ended it."""
        config, argv = self._as_sent(run)
        entry = SweepRun(
            run=run.name,
            label=run.label,
            parallel=run.parallel,
            rate=run.rate,
            repeat=run.repeat,
            trace=run.config.trace.name,
            status="cut",
            reason=BEGUN,
            command=shlex.join(["loadgen", *argv]),
            started=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            duration_s=0.0,
            sweep=self._plan.command,
        )
        self._keep(entry)
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run before took its own handler away
            warmed = self._prepare(run, config, number)
            result = send_load(config, self._place(run, warmed))
        except InputError as error:
            entry = msgspec.structs.replace(entry, status="failed", reason=str(error))
        else:
            entry = self._ended(entry, run, result)
        self._keep(entry)
        if entry.status == "cut":
            raise KeyboardInterrupt
        if entry.status != "done":
            tell(f"  {entry.status.upper()}: {entry.reason}")

    def _as_sent(self, run: PlannedRun) -> tuple[LoadConfig, Sequence[str]]:
        """Return the run's settings and command line: the sweep's nonce, and one of its own where no cache is reset."""
        nonce = run.config.nonce or self._nonce
        if self._cold:
            pairs = list(dict.fromkeys((other.repeat, other.point) for other in self._plan.runs))
            number = pairs.index((run.repeat, run.point))
            if self._plan.shares_engine:
                number += len(pairs) * self._plan.labels.index(run.label)
            nonce = f"{nonce}{TURN}{number + 1}"
        return replace(run.config, nonce=nonce), (*run.argv, "--nonce", nonce)

    def _place(self, run: PlannedRun, warmed: int) -> dict[str, object]:
        target = self._targets[run.label]
        cache = "reset" if target.resets and not self._cold else "other tokens" if self._cold else "kept"
        return {"run": run.name, "label": run.label, "repeat": run.repeat, "warm_up_requests": warmed, "cache": cache}

    def _prepare(self, run: PlannedRun, config: LoadConfig, number: int) -> int:
        """Warm the engine up, wait until it is idle, empty its cache; return the requests of the warm-up."""
        target, warmed = self._targets[run.label], 0
        if self._plan.warm_up:
            with tempfile.TemporaryDirectory(prefix="kvtape-warm-up-") as folder:
                trace = Path(folder) / "warm-up.jsonl"
                result = send_load(warm_up_of(config, self._plan.warm_up, trace, number), {})
            if result.outcome.stopped in {"SIGINT", "SIGTERM"}:
                raise KeyboardInterrupt
            warmed = result.outcome.tally.statuses["ok"]
            if not warmed:
                raise InputError(f"warm-up: {failure_words(result)}")
            tell(f"  warm-up: {warmed} requests in {result.outcome.seconds:.1f} s, not counted")
        with _control(config) as control:
            if not wait_until_idle(control):
                tell(f"  note: the engine is not idle after {IDLE_WAIT_S:g} s")
            if target.resets:
                probe = cache_probe(target.dialect, target.model, config.vocabulary, target.block_size)
                self._tell_once(reset_prefix_cache(control, target.dialect, probe))
        return warmed

    def _ended(self, entry: SweepRun, run: PlannedRun, result: Ending) -> SweepRun:
        outcome, lacking, metrics = result.outcome, result.lacking, result.summary.metrics
        for note in result.summary.notes:
            if note not in self._targets[run.label].notes:
                self._tell_once(note)
        seconds = round(outcome.seconds, 3)
        if outcome.stopped in {"SIGINT", "SIGTERM"} and not outcome.failures:
            return msgspec.structs.replace(entry, reason=outcome.stopped, duration_s=seconds)
        reason = None if lacking is None else str(lacking)
        if exit_code(outcome):
            reason = failure_words(result)
        elif not _responds(run.config):
            reason = "the engine does not respond at the run's end"
        if metrics is not None and reason is None:
            self._missed = self._missed or not all(slo.met for slo in metrics.slos)
            tell(f"  {result_words(metrics)}")
        return msgspec.structs.replace(
            entry, status="done" if reason is None else "failed", reason=reason, duration_s=seconds
        )

    def _keep(self, entry: SweepRun) -> None:
        if entry.reason == BEGUN:  # the index is in the order of beginning
            self._entries.pop(entry.run, None)
        self._entries[entry.run] = entry
        write_sweep(self._plan.folder, list(self._entries.values()))

    def _tell_once(self, note: str | None) -> None:
        if note is not None and note not in self._told:
            self._told.add(note)
            tell(f"  note: {note}")


def result_words(metrics: TraceMetrics) -> str:
    """Return what a run gave, for its end."""
    ttft = metrics.per_request["ttft_ms"]
    waits = [value for value in (statistic(ttft, "p50"), statistic(ttft, "p90")) if value is not None]
    text = f"{metrics.requests.completed:,} of {metrics.requests.n:,} requests"
    if metrics.workload.completion_tps.overall is not None:
        text += f"; {rate(metrics.workload.completion_tps.overall)} tok/s"
    text += f"; TTFT p50 and p90 {', '.join(map(duration_ms, waits))} ms" if waits else ""
    missed = [slo.slo for slo in metrics.slos if not slo.met]
    return f"{text}; SLO MISSED: {', '.join(missed)}" if missed else text


def warm_up_of(config: LoadConfig, requests: int, trace: Path, number: int) -> LoadConfig:
    """Return a closed loop of single requests like the run's, with tokens of their own; ``number``: the run's."""
    from_file = config.dataset_path is not None
    return replace(
        config,
        trace=trace,
        pattern="poisson",
        rate=None,
        rate_to=None,
        burstiness=None,
        spacing=None,
        group_size=1,
        group_gap_s=None,
        burst_size=None,
        burst_every_s=None,
        steps=None,
        step_s=None,
        rate_series=(),
        duration_s=None,
        at_end="finish",
        number=requests,
        parallel=config.requests_at_once or WARM_UP_PARALLEL,
        parallel_sessions=None,
        turns=ONE_TURN,
        min_turns=None,
        max_turns=1 if from_file else None,
        tool_latency_s=config.tool_latency_s if from_file else None,
        nonce=f"{config.nonce} warm-up {number}",
        run=replace(config.run, slos=(), log_interval_s=0.0),
    )


def find_target(run: PlannedRun) -> Target:
    """Ask the engine behind a label. Raises InputError if it is not there."""
    config = run.config
    with _control(config) as control:
        try:
            model = control.resolve_model(config.model)
        except InputError as error:
            raise InputError(f"{run.label}: {error}") from None
        found, facts = find_dialect(control, config.dialect), control.facts()
        ready = readiness_of(control, found.dialect, facts)
        has_reset = found.dialect.reset_cache is not None and ready.has_reset is not False
        words = target_words(control.url, model, facts, ready, found.evidence)
        notes = [*page_notes(facts), *dialect_notes(found.dialect), *readiness_notes(ready)]
        announce(PROG, [run.label, *words], notes, config.run)
    return Target(
        model=model,
        dialect=found.dialect,
        resets=has_reset,
        block_size=facts.engine.block_size,
        notes=(*notes, *recognition_notes(found)),
    )


def wait_until_idle(control: ControlClient) -> bool:
    """Wait for the requests of others, and cancelled ones; True: the engine is idle, or does not tell."""
    until_s = time.monotonic() + IDLE_WAIT_S
    while time.monotonic() < until_s:
        gauges = control.facts().gauges
        if not (gauges.get("running") or gauges.get("waiting")):
            return True
        time.sleep(IDLE_POLL_S)
    return False


def failure_words(result: Ending) -> str:
    """Return the reason of a run without one good response."""
    outcome = result.outcome
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.tally.errors.items()))
    return "; ".join(outcome.failures) or f"no request completed{f' ({kinds})' if kinds else ''}"


def _responds(config: LoadConfig) -> bool:
    with _control(config) as control:
        status = control.status("/v1/models")
        return status is not None and status < SERVER_ERROR  # a gateway answers for an engine that is gone


def _control(config: LoadConfig) -> ControlClient:
    return ControlClient(str(origin_of(config.url)), config.run.access)


def tell(text: str) -> None:
    print(f"{PROG}: {text}" if not text.startswith("  ") else text, file=sys.stderr, flush=True)
