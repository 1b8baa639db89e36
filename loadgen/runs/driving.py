"""A job sent to a target by its shards, with its trace written and its progress shown: what every run does."""

import asyncio
import contextlib
import signal
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec

from loadgen.core.job import Job, Shard, add_shares
from loadgen.core.runflags import ONE_PROCESS, STDERR, RunFlags
from loadgen.runs.merging import merge_parts, part_of, parts_of
from loadgen.runs.outcome import RunOutcome, is_answered, outcome_of
from loadgen.runs.progress import RunProgress, TargetRate
from loadgen.runs.resumption import Resumed, resume_trace, resumed_at
from loadgen.runs.shardmessages import Done, Failed, Progress, Ready, Setup
from loadgen.runs.shards import CORES_A_SHARD, Header, Host, ShardProcess, Shards
from measure.metrics.client import with_delays
from tracefile import InputError, Meta, Workload
from tracefile.commandline.printing import printable
from tracefile.commandline.workers import usable_cores
from tracefile.storage.mending import mend
from tracefile.storage.output import PROGRESS, check_output

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings of a run: job, target, trace and bounds."""

    job: Job
    url: str
    trace: Path
    meta: Meta
    """The trace's header without its clock and digest."""
    run: RunFlags = ONE_PROCESS
    sessions: int | None = None
    """Null: unknown, or without end."""
    parallel: int | None = None
    timeout_s: float | None = None
    overwrite: bool = False
    duration_s: float | None = None
    """Time of the last start; null: the job ends by itself."""
    cancels: bool = False
    """True if requests in flight are cancelled at ``duration_s``."""
    target_rate: TargetRate | None = None
    empty: str = "nothing to send"
    unreported: str = "the engine reports no cached tokens"
    """Warning after the first output without cached tokens."""


def run_job(config: RunConfig) -> RunOutcome:
    """Run the job until all has ended or a signal stops it; the trace is then complete.

    Raises InputError for an unusable target, trace or job, KeyboardInterrupt for a signal before t = 0 or a second one.
    """
    log = config.run.json_progress
    if log not in (None, STDERR):
        check_output(log, PROGRESS, [config.trace], "--json-progress")
    with host_of(config.run) as host, opened(log) as json_file:
        run = Run(config, host, find_earlier(config))
        try:
            words = asyncio.run(run.shown(json_file))
        except asyncio.CancelledError:
            run.tell_of_parts()
            raise KeyboardInterrupt from None
        return run.outcome(words)


@contextlib.contextmanager
def host_of(flags: RunFlags) -> Iterator[Host]:
    if flags.ray is None:
        yield Host(ShardProcess.start, usable_cores(), apart=False)
        return
    from loadgen.runs.rayshards import ray_host  # noqa: PLC0415 - the few who want it wait for it

    with ray_host(flags.ray) as host:
        yield host


def shard_count(config: RunConfig, cores: int) -> int:
    """Never more than there are sessions, or requests allowed in flight."""
    wanted = config.run.procs
    if wanted is None:
        wanted = max(1, cores // CORES_A_SHARD)
    count = min(bound for bound in (wanted, config.sessions, config.parallel) if bound is not None)
    if config.run.ray is not None and count * CORES_A_SHARD > cores:
        raise InputError(
            f"--procs: {count} shards on {cores} cores; expected a Ray cluster with {CORES_A_SHARD} for each"
        )
    return count


def find_earlier(config: RunConfig) -> Resumed | None:
    """The earlier run that this one continues; null: none. Raises InputError if it cannot, or if data would be lost."""
    trace = config.trace
    if config.run.resume:
        return resume_trace(trace, parts_of(trace), config.job, config.meta)
    if config.overwrite:
        return None
    if parts := parts_of(trace):
        raise InputError(
            f"{parts[0]}: left by a run that was killed; expected --resume to go on with it, or --overwrite"
        )
    if trace.is_file() and (size := trace.stat().st_size):
        raise InputError(f"{trace}: already has {size} bytes; expected a new file, --resume or --overwrite")
    return None


class Run:
    """Run from its first process to its complete trace."""

    def __init__(self, config: RunConfig, host: Host, resumed: Resumed | None) -> None:
        self._config = config
        self._host = host
        self._resumed = resumed
        self._count = count = shard_count(config, host.cores)
        self._in_parts = count > 1 or host.apart
        self._parts = [part_of(config.trace, index) for index in range(count)] if self._in_parts else [config.trace]
        self._meta = config.meta
        if count > 1:
            self._meta = msgspec.structs.replace(config.meta, extra=config.meta.extra | {"shards": count})
        self._digest = ""
        self._where: list[str] = []
        self._stopped: str | None = None

    async def shown(self, json_file: TextIO | None) -> list[Done | Failed]:
        """Run to the end; return each shard's last message."""
        config = self._config
        async with Shards(self._count, self._host) as shards:
            with interrupted(shards):
                ready = await shards.ready(self._setups())
                self._where = [link.where for link in shards.links]
                self._make_room()
                zero = shards.go(self._header(ready), 0.0 if self._resumed is None else self._resumed.from_ms)
                progress = RunProgress(
                    zero,
                    self._where,
                    planned=planned_by(ready),
                    last_send_s=last_send_s(ready, config.duration_s),
                    ends_s=config.duration_s if config.cancels else None,
                    target_rate=config.target_rate,
                    stopping=lambda: shards.stopping,
                )
                # Imported while the shards work: rich takes longer to load than the run to start.
                from loadgen.runs.view import watched  # noqa: PLC0415

                warning = UnreportedWarning(config.unreported, over=config.run.json_progress == STDERR)

                async with watched(progress, json_file, config.run.log_interval_s):
                    words = await shards.ended(partial(_heed, shards, progress, warning))
            self._stopped = shards.stopping
            self._meta = await shards.fetch(self._parts)
        return words

    def outcome(self, words: list[Done | Failed]) -> RunOutcome:
        """Complete the trace. Raises InputError if a shard failed because of the input."""
        trace = self._config.trace
        refused = next((word.text for word in words if isinstance(word, Failed) and word.is_input), None)
        if refused is not None and not self._in_parts:  # what is there may be another run's
            raise InputError(refused)
        outcome = outcome_of(words, self._parts, where=self._where, digest=self._digest, stopped=self._stopped)
        if self._in_parts:
            earlier = [] if self._resumed is None else [trace]
            merge_parts(trace, [*earlier, *self._parts], self._with_delays(words))
        elif outcome.failures and trace.exists():
            mend(trace)
        if refused is not None:
            raise InputError(refused)
        reason = next((word.reason for word in words if isinstance(word, Done) and word.reason), "")
        if reason and self._config.run.json_progress != STDERR:
            print(printable(f"the engine refuses: {reason}"), file=sys.stderr)
        if self._resumed is None and trace.is_file() and not is_answered(outcome):
            trace.unlink()  # so that the corrected command has its name
            return replace(outcome, kept=False)
        return outcome

    def _with_delays(self, words: Sequence[Done | Failed]) -> Meta:
        done = [word for word in words if isinstance(word, Done)]
        loop_ms, crossing_ms = array("d"), array("d")
        for word in done:
            loop_ms += word.loop_delay_ms
            crossing_ms += word.crossing_delay_ms
        return with_delays(self._meta, loop_ms, crossing_ms)

    def tell_of_parts(self) -> None:
        left = [str(part) for part in self._parts if part.exists()]
        if left and self._where:  # nothing is recorded before they are all ready
            print(f"warning: left as it was: {', '.join(left)}; --resume goes on with it", file=sys.stderr)

    def _setups(self) -> list[Setup]:
        config, count = self._config, self._count
        return [
            Setup(
                job=config.job,
                shard=Shard(index, count),
                url=config.url,
                access=config.run.access,
                trace=part,
                overwrite=config.overwrite or self._in_parts,
                parallel=None if config.parallel is None else len(range(index, config.parallel, count)),
                timeout_s=config.timeout_s,
                ends_ms=config.duration_s * 1e3 if config.cancels and config.duration_s else None,
                resumed=None if self._resumed is None else config.trace,
            )
            for index, part in enumerate(self._parts)
        ]

    def _header(self, ready: Sequence[Ready]) -> Header:
        """The header, after the shards have drawn the load. Raises InputError for an empty load."""
        if planned_by(ready) == 0:
            raise InputError(
                self._config.empty
                if self._resumed is None
                else f"--resume: {self._config.trace}: the run is complete; expected one that was cut short"
            )
        self._digest = add_shares([each.digest_share for each in ready])
        if self._resumed is not None:
            return partial(resumed_at, self._resumed)
        return partial(zeroed, self._meta, self._digest)

    def _make_room(self) -> None:
        """Remove the files to be overwritten, so that none is read as a part of this run."""
        if self._config.overwrite and self._in_parts:
            for path in [*parts_of(self._config.trace), self._config.trace]:
                path.unlink(missing_ok=True)


def zeroed(meta: Meta, digest: str, epoch_unix_ns: int) -> Meta:
    workload = msgspec.structs.replace(meta.workload or Workload(), digest=digest)
    return msgspec.structs.replace(meta, workload=workload, epoch_unix_ns=epoch_unix_ns)


def planned_by(ready: Sequence[Ready]) -> int | None:
    """Requests of all shards; null: unknown to some shard."""
    planned = [each.planned for each in ready]
    return None if None in planned else sum(count for count in planned if count is not None)


def last_send_s(ready: Sequence[Ready], duration_s: float | None) -> float | None:
    """Time of the last send by the plan, or by the run's duration; null: responses decide."""
    planned = [each.last_send_ms / 1e3 for each in ready if each.last_send_ms is not None]
    return max(planned) if planned and len(planned) == len(ready) else duration_s


@dataclass(slots=True)
class UnreportedWarning:
    """Warning, once, that completed requests came without cached tokens: the run need not go on to its end."""

    text: str
    over: bool = False

    def heed(self, progress: RunProgress) -> None:
        if not self.over and (reported := progress.reports_cached()) is not None:
            self.over = True
            if not reported:
                print(f"warning: {self.text}", file=sys.stderr, flush=True)


def _heed(
    shards: Shards,
    progress: RunProgress,
    unreported: UnreportedWarning,
    index: int,
    word: Progress | Done | Failed,
) -> None:
    """End a run if the engine refuses every request, which no single shard can see."""
    progress.hear(index, word)
    unreported.heed(progress)
    if progress.only_refusals():
        shards.stop("refused")


@contextlib.contextmanager
def opened(path: str | None) -> Iterator[TextIO | None]:
    if path is None or path == STDERR:
        yield None if path is None else sys.stderr
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise InputError(
            f"--json-progress: {path}: {error.strerror or error}; expected a file to write, or {STDERR}"
        ) from error
    with file:
        yield file


@contextlib.contextmanager
def interrupted(shards: Shards) -> Iterator[None]:
    """Ctrl-C or SIGTERM stops a begun run; before t = 0 and the second time, it ends at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # within a coroutine

    def on_signal(number: signal.Signals) -> None:
        if shards.going and shards.stopping is None:
            shards.stop(number.name)
        else:
            shards.kill()
            task.cancel()

    for number in INTERRUPTS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in INTERRUPTS:
            loop.remove_signal_handler(number)


def announce(command: str, words: Iterable[str], notes: Iterable[str], run: RunFlags) -> None:
    """Print both on stderr, unless it is for the JSON of ``--json-progress``."""
    if run.json_progress == STDERR:
        return
    print(f"{command}: {' · '.join(words)}", file=sys.stderr)
    for note in notes:
        print(f"{command}: note: {note}", file=sys.stderr, flush=True)


def tokenizer_words(tokenizer: str | None, unknown: str | None) -> str:
    """Return the part on the prompts' tokens; ``unknown``: reason why no tokenizer proves their lengths."""
    if tokenizer is None:
        return f"prompts of text, lengths unproven ({unknown})"
    return "prompts of token ids" if tokenizer == "ids" else f"tokenizer {tokenizer}"
