"""Parent of a run: starts workers, shows progress, handles interrupts, merges the shards' traces."""

import asyncio
import contextlib
import signal
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from loadgen.core.job import Job, Shard, add_shares
from loadgen.core.settings import RunSettings
from loadgen.runs.merging import merge_parts, part_path, part_paths
from loadgen.runs.messages import Done, Failed, Progress, Ready, Setup
from loadgen.runs.outcome import RunOutcome, is_answered, outcome_of
from loadgen.runs.progress import RunProgress
from loadgen.runs.workers import Host, WorkerProcess, Workers
from measure.metrics.client import with_delays
from tracefile.commandline.printing import printable
from tracefile.commandline.workers import usable_cores
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Workload
from tracefile.storage.repair import repair

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Job with its limits: sessions, requests in flight, end."""

    settings: RunSettings
    job: Job
    meta: Meta
    """Trace header without clock and workload digest."""
    sessions: int | None = None
    """Null: unknown, or without end."""
    parallel: int | None = None
    """Limit of requests in flight; null: no limit."""
    ends_s: float | None = None
    """Time of the last start; null: the job ends by itself."""
    empty: str = "nothing to send"
    unreported: str = "the engine reports no cached tokens"
    """Warning after the first output without cached tokens."""


def run_job(config: RunConfig) -> RunOutcome:
    """Run the job until all requests have ended or a signal stops it; the trace is then complete.

    Raises InputError for an unusable target, trace or job, KeyboardInterrupt for a signal before t = 0 or a second
    time.
    """
    refuse_earlier(config.settings)
    with host_of(config.settings) as host:
        run = Run(config, host)
        try:
            words = asyncio.run(run.shown())
        except asyncio.CancelledError:
            run.warn_of_parts()
            raise KeyboardInterrupt from None
        return run.outcome(words)


@contextlib.contextmanager
def host_of(settings: RunSettings) -> Iterator[Host]:
    if settings.ray is None:
        yield Host(WorkerProcess.start, usable_cores(), apart=False)
        return
    from loadgen.runs.rayworkers import ray_host  # noqa: PLC0415 - imported only with --ray

    with ray_host(settings.ray) as host:
        yield host


def refuse_earlier(settings: RunSettings) -> None:
    """Raise InputError if the run would overwrite records."""
    trace = settings.trace
    if settings.overwrite:
        return
    if parts := part_paths(trace):
        raise InputError(f"{parts[0]}: left by a killed run; expected another name, or --overwrite")
    if trace.is_file() and (size := trace.stat().st_size):
        raise InputError(f"{trace}: already has {size} bytes; expected a new file, or --overwrite")


def worker_count(config: RunConfig, cores: int) -> int:
    """Number of workers, limited by sessions and requests in flight."""
    requested = cores if config.settings.procs is None else config.settings.procs
    count = min(bound for bound in (requested, config.sessions, config.parallel) if bound is not None)
    if config.settings.ray is not None and count > cores:
        raise InputError(f"--procs: {count} workers on {cores} cores; expected a Ray cluster with a core for each")
    return max(1, count)


class Run:
    """Run from its first process to its complete trace."""

    def __init__(self, config: RunConfig, host: Host) -> None:
        self._config, self._host = config, host
        self._count = count = worker_count(config, host.cores)
        self._in_parts = count > 1 or host.apart
        trace = config.settings.trace
        self._parts = [part_path(trace, index) for index in range(count)] if self._in_parts else [trace]
        self._meta = config.meta
        if count > 1:
            self._meta = msgspec.structs.replace(config.meta, extra=config.meta.extra | {"workers": count})
        self._digest = ""
        self._where: list[str] = []
        self._stopped: str | None = None

    async def shown(self) -> list[Done | Failed]:
        """Run to the end; return the last message of each worker."""
        config = self._config
        async with Workers(self._count, self._host) as workers:
            with interrupted(workers):
                ready = await workers.ready(self._setups())
                self._where = [link.where for link in workers.links]
                self._remove_overwritten()
                zero_ns, self._meta = workers.go(self._header(ready))
                progress = RunProgress(
                    zero_ns,
                    self._count,
                    planned=planned_by(ready),
                    last_send_s=last_send_s(ready, config.ends_s),
                    stopping=lambda: workers.stopping,
                )
                # Imported while the workers run: rich takes longer to load than the run to start.
                from loadgen.runs.view import watched  # noqa: PLC0415

                warning = UnreportedWarning(config.unreported)
                async with watched(progress):
                    words = await workers.ended(partial(_handle, workers, progress, warning))
            self._stopped = workers.stopping
            await workers.fetch(self._parts)
        return words

    def outcome(self, words: list[Done | Failed]) -> RunOutcome:
        """Complete the trace. Raises InputError if a worker failed because of the input."""
        trace = self._config.settings.trace
        refused = next((word.text for word in words if isinstance(word, Failed) and word.is_input), None)
        if refused is not None and not self._in_parts:  # the file may belong to another run
            raise InputError(refused)
        outcome = outcome_of(words, self._parts, where=self._where, digest=self._digest, stopped=self._stopped)
        if self._in_parts:
            merge_parts(trace, self._parts, self._with_delays(words))
        elif outcome.failures and trace.exists():
            repair(trace)
        if refused is not None:
            raise InputError(refused)
        reason = next((word.reason for word in words if isinstance(word, Done) and word.reason), "")
        if reason:
            print(printable(f"the engine refuses: {reason}"), file=sys.stderr)
        if trace.is_file() and not is_answered(outcome):
            trace.unlink()  # so that a corrected command can use the name
            return replace(outcome, has_trace=False)
        return outcome

    def _with_delays(self, words: Sequence[Done | Failed]) -> Meta:
        loop_ms, follow_up_ms = array("d"), array("d")
        for word in words:
            if isinstance(word, Done):
                loop_ms += word.loop_delay_ms
                follow_up_ms += word.follow_up_delay_ms
        return with_delays(self._meta, loop_ms, follow_up_ms)

    def warn_of_parts(self) -> None:
        left = [str(part) for part in self._parts if part.exists()]
        if left and self._where:  # no records before all workers are ready
            print(f"warning: incomplete traces left: {', '.join(left)}", file=sys.stderr)

    def _setups(self) -> list[Setup]:
        config, shards = self._config, [Shard(index, self._count) for index in range(self._count)]
        return [
            Setup(
                settings=config.settings,
                job=config.job,
                shard=shard,
                trace=part,
                overwrite=config.settings.overwrite or self._in_parts,
                parallel=shard.share_of(config.parallel),
            )
            for shard, part in zip(shards, self._parts, strict=True)
        ]

    def _header(self, ready: Sequence[Ready]) -> Meta:
        """Trace header, after the workers have drawn the load. Raises InputError for an empty load."""
        if planned_by(ready) == 0:
            raise InputError(self._config.empty)
        self._digest = add_shares([worker.digest_share for worker in ready])
        workload = msgspec.structs.replace(self._meta.workload or Workload(), digest=self._digest)
        return msgspec.structs.replace(self._meta, workload=workload)

    def _remove_overwritten(self) -> None:
        """Remove the files to be overwritten, so that none is read as a shard of this run."""
        if self._config.settings.overwrite and self._in_parts:
            for path in [*part_paths(self._config.settings.trace), self._config.settings.trace]:
                path.unlink(missing_ok=True)


def planned_by(ready: Sequence[Ready]) -> int | None:
    """Planned requests of all workers; null: unknown to some worker."""
    planned = [worker.planned for worker in ready]
    return None if None in planned else sum(count for count in planned if count is not None)


def last_send_s(ready: Sequence[Ready], ends_s: float | None) -> float | None:
    """Time of the last send by the plan, or by the run's duration; null: responses decide."""
    planned = [worker.last_send_ms / 1e3 for worker in ready if worker.last_send_ms is not None]
    return max(planned) if planned and len(planned) == len(ready) else ends_s


@dataclass(slots=True)
class UnreportedWarning:
    """Warning, printed once, that responses have no cached tokens: the user can stop the run early."""

    text: str
    over: bool = False

    def update(self, progress: RunProgress) -> None:
        if not self.over and (reported := progress.reports_cached()) is not None:
            self.over = True
            if not reported:
                print(f"warning: {self.text}", file=sys.stderr, flush=True)


def _handle(
    workers: Workers, progress: RunProgress, unreported: UnreportedWarning, index: int, word: Progress | Done | Failed
) -> None:
    """Update the progress; stop the run if the engine refuses every request, which no single worker can see."""
    progress.receive(index, word)
    unreported.update(progress)
    if progress.only_refusals():
        workers.stop("refused")


@contextlib.contextmanager
def interrupted(workers: Workers) -> Iterator[None]:
    """Ctrl-C or SIGTERM stops a started run; before t = 0 and the second time, it ends at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # within a coroutine

    def on_signal(number: signal.Signals) -> None:
        if workers.going and workers.stopping is None:
            workers.stop(number.name)
        else:
            workers.kill()
            task.cancel()

    for number in INTERRUPTS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in INTERRUPTS:
            loop.remove_signal_handler(number)


def announce(command: str, words: Iterable[str], notes: Iterable[str]) -> None:
    """Print the start line and notes on stderr."""
    print(f"{command}: {' · '.join(words)}", file=sys.stderr)
    for note in notes:
        print(f"{command}: note: {note}", file=sys.stderr, flush=True)


def tokenizer_words(tokenizer: str | None, unknown: str | None) -> str:
    """Return the start line's part on prompt tokens; ``unknown``: reason why their counts cannot be verified."""
    if tokenizer is None:
        return f"text prompts, token counts not verified ({unknown})"
    return "token-id prompts" if tokenizer == "ids" else f"tokenizer {tokenizer}"
