"""Runs of a sweep in sequence: warm up the engine, reset its prefix cache, send the load, record the result."""

import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engines.control import ControlClient, reset_prefix_cache
from engines.detection import dialect_notes
from engines.readiness import Target, inspect_engine
from loadgen.core.bodies import cache_probe
from loadgen.core.request import origin_of
from loadgen.loadrun import send_load
from loadgen.plan.config import SINGLE_TURN, LoadConfig
from loadgen.runs.coordinator import announce
from loadgen.runs.outcome import INTERRUPTED, exit_code
from loadgen.runs.summary import RunResult
from loadgen.sweepplan import PROG, PlannedRun, SweepPlan
from measure.sweepindex import INDEX, SweepRun, read_sweep, write_sweep
from tracefile.records.errors import InputError

IDLE_WAIT_S = 60.0
IDLE_POLL_S = 0.2
WARM_UP_PARALLEL = 4
RUN_SEPARATOR = "~"
"""Between the sweep's nonce and the number of a run with different tokens."""
NONCE_FLAG = " --nonce "
"""Before the nonce, at the end of a run's command."""


def run_sweep(plan: SweepPlan) -> int:
    """Execute the missing runs; 1 if a run failed or missed an SLO, 130 if interrupted."""
    sweep = Sweep(plan)
    try:
        return sweep.run()
    except KeyboardInterrupt:
        log(f"interrupted; continue with: {plan.command}")
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _indexed_runs(plan: SweepPlan) -> list[SweepRun]:
    """Return the runs of the folder's index. Raises InputError for a run that is not in this sweep."""
    folder = plan.folder
    if not (folder / INDEX).exists():
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise InputError(f"--output {folder}: has other files and no {INDEX}; expected a new folder, or a sweep's")
        return []
    commands = {run.name: shlex.join(["loadgen", *run.argv]) for run in plan.runs}
    indexed = read_sweep(folder)
    for entry in indexed:
        if commands.get(entry.run) != entry.command.rpartition(NONCE_FLAG)[0]:
            raise InputError(f"--output {folder}: has run {entry.run} of {entry.command}; expected another folder")
    return indexed


class Sweep:
    """Sweep from its first run to its last."""

    def __init__(self, plan: SweepPlan) -> None:
        indexed = _indexed_runs(plan)
        self._plan = plan
        self._entries = {entry.run: entry for entry in indexed}
        self._targets: dict[str, Target] = {}
        earlier = [shlex.split(entry.command)[-1] for entry in indexed]
        self._nonce = earlier[0].partition(RUN_SEPARATOR)[0] if earlier else secrets.token_hex(8)
        self._cold = any(RUN_SEPARATOR in nonce for nonce in earlier)
        """True if every run sends different tokens: for all labels, so that all get the same load."""
        self._missed = False

    def run(self) -> int:
        """Execute every run that is not done; return the exit code."""
        plan = self._plan
        done = [entry.run for entry in self._entries.values() if entry.status == "done"]
        to_do = [run for run in plan.runs if run.name not in done or not run.config.trace.exists()]
        self._find_targets(to_do)
        plan.folder.mkdir(parents=True, exist_ok=True)
        for number, run in enumerate(plan.runs, 1):
            if run in to_do:
                log(f"run {number} of {len(plan.runs)}, {run.name}")
                self._run_planned(run, number)
        failed = [entry for entry in self._entries.values() if entry.status != "done"]
        print(f"{len(plan.runs) - len(failed)} of {len(plan.runs)} runs done; compare them with:")
        print(f"report show {shlex.quote(str(plan.folder))} --html sweep.html")
        for entry in failed:
            print(f"{entry.run}: {entry.status.upper()}: {entry.reason}")
        return int(bool(failed) or self._missed)

    def _find_targets(self, to_do: Sequence[PlannedRun]) -> None:
        """Query the engine of each label, before the first request."""
        for run in to_do:
            if run.label not in self._targets:
                self._targets[run.label] = find_target(run)
        cold = [label for label, target in self._targets.items() if not resets(target)]
        self._cold = self._cold or bool(cold)
        if cold:
            log(f"note: {', '.join(cold)}: no reset of the prefix cache: every run sends different tokens")

    def _run_planned(self, run: PlannedRun, number: int) -> None:
        """Execute a run, and record its status in the index. Raises KeyboardInterrupt if a signal ended it."""
        config = replace(run.config, nonce=self._nonce_of(run))
        entry = SweepRun(
            run=run.name,
            label=run.label,
            parallel=run.parallel,
            rate=run.rate,
            repeat=run.repeat,
            trace=run.config.trace.name,
            status="cut",
            reason="started, not ended",
            command=f"{shlex.join(['loadgen', *run.argv])}{NONCE_FLAG}{shlex.quote(str(config.nonce))}",
            started=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            duration_s=0.0,
        )
        self._entries.pop(run.name, None)  # the index is in the order of starts
        self._record(entry)
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # the previous run removed its handler
            position = {"run": run.name, "label": run.label, "repeat": run.repeat}
            entry = self._ended(entry, send_load(config, position | self._prepare(run, config, number)))
        except InputError as error:
            entry = msgspec.structs.replace(entry, status="failed", reason=str(error))
        self._record(entry)
        if entry.status == "cut":
            raise KeyboardInterrupt
        if entry.status == "failed":
            log(f"  FAILED: {entry.reason}")

    def _nonce_of(self, run: PlannedRun) -> str:
        """Return the sweep's nonce, or a nonce of this run if the prefix cache cannot be reset."""
        nonce = run.config.nonce or self._nonce
        if not self._cold:
            return nonce
        pairs = list(dict.fromkeys((other.repeat, other.point) for other in self._plan.runs))
        number = pairs.index((run.repeat, run.point))
        if self._plan.shares_engine:
            number += len(pairs) * self._plan.labels.index(run.label)
        return f"{nonce}{RUN_SEPARATOR}{number + 1}"

    def _prepare(self, run: PlannedRun, config: LoadConfig, number: int) -> dict[str, object]:
        """Warm up the engine, wait until it is idle, reset its prefix cache; return fields for the header."""
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
        with _control(config) as control:
            if not wait_until_idle(control):
                log(f"  note: the engine is not idle after {IDLE_WAIT_S:g} s")
            if resets(target):
                probe = cache_probe(target.dialect, target.model or "", config.vocabulary, target.block_size)
                if note := reset_prefix_cache(control, target.dialect, probe):
                    log(f"  note: {note}")
        return {"warm_up_requests": warmed, "cache": "other tokens" if self._cold else "reset"}

    def _ended(self, entry: SweepRun, result: RunResult) -> SweepRun:
        outcome, metrics = result.outcome, result.summary.metrics
        seconds = round(outcome.seconds, 3)
        if outcome.stopped in {"SIGINT", "SIGTERM"} and not outcome.failures:
            return msgspec.structs.replace(entry, reason=outcome.stopped, duration_s=seconds)
        missing = None if result.missing_metric is None else str(result.missing_metric)
        reason = failure_words(result) if exit_code(outcome) else missing
        if metrics is not None and reason is None:
            missed = [slo.slo for slo in metrics.slos if not slo.met]
            self._missed = self._missed or bool(missed)
            text = f"  {metrics.requests.completed:,} of {metrics.requests.n:,} requests in {seconds:g} s"
            log(f"{text}; SLO MISSED: {', '.join(missed)}" if missed else text)
        return msgspec.structs.replace(
            entry, status="done" if reason is None else "failed", reason=reason, duration_s=seconds
        )

    def _record(self, entry: SweepRun) -> None:
        self._entries[entry.run] = entry
        write_sweep(self._plan.folder, list(self._entries.values()))


def warm_up_of(config: LoadConfig, requests: int, trace: Path, number: int) -> LoadConfig:
    """Return a closed loop of single requests with equal lengths, different tokens; ``number``: the run's."""
    return replace(
        config,
        trace=trace,
        pattern="poisson",
        rate=None,
        group_size=1,
        rate_series=(),
        duration_s=None,
        number=requests,
        parallel=config.parallel or WARM_UP_PARALLEL,
        turns=SINGLE_TURN,
        nonce=f"{config.nonce} warm-up {number}",
        slos=(),
    )


def find_target(run: PlannedRun) -> Target:
    """Query the engine of a label. Raises InputError if it is unreachable."""
    config = run.config
    with _control(config) as control:
        try:
            model = control.resolve_model(config.model)
        except InputError as error:
            raise InputError(f"{run.label}: {error}") from None
        target = inspect_engine(control, model, config.dialect)
    announce(PROG, [run.label, *target.words()], [*target.notes(), *dialect_notes(target.dialect)])
    return target


def resets(target: Target) -> bool:
    """Return True if the engine's prefix cache can be reset before each run."""
    return target.dialect.reset_cache is not None and target.has_reset is not False


def wait_until_idle(control: ControlClient) -> bool:
    """Wait until running and waiting requests have ended; True: the engine is idle, or reports no gauges."""
    until_s = time.monotonic() + IDLE_WAIT_S
    while time.monotonic() < until_s:
        gauges = control.facts().gauges
        if not (gauges.get("running") or gauges.get("waiting")):
            return True
        time.sleep(IDLE_POLL_S)
    return False


def failure_words(result: RunResult) -> str:
    """Return the reason of a run without a successful request."""
    outcome = result.outcome
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.tally.errors.items()))
    return "; ".join(outcome.failures) or f"no request completed{f' ({kinds})' if kinds else ''}"


def _control(config: LoadConfig) -> ControlClient:
    return ControlClient(str(origin_of(config.url)), config.access)


def log(text: str) -> None:
    print(f"{PROG}: {text}" if not text.startswith("  ") else text, file=sys.stderr, flush=True)
