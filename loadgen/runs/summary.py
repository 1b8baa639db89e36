"""Summary of a run for terminal and JSON: its trace's metrics, and the client's own fitness."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from engines.facts import EngineFacts, PrefixCounters
from loadgen.core.runflags import RunFlags
from loadgen.runs.outcome import RunOutcome, exit_code
from loadgen.text.prefixtruth import TruthReport
from measure.metrics.results import TraceMetrics
from measure.metrics.tables import metric_lines
from measure.metrics.trace import measure_run
from measure.runs import STATUSES, Run, load_run
from tracefile import InputError
from wire.native import forms

CPU_LIMIT = 0.9
SHORT_S = 2.0
"""In shorter runs, start-up outweighs sending."""


class ProcessUse(msgspec.Struct, frozen=True):
    """CPU use of one process of the client."""

    process: str
    """``shard 0`` (plans, builds, reads, records), ``sender 0`` (sends) …"""
    where: str
    cpu_s: float
    cpu: float
    """CPU time over the run's length, in cores."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run; null where there is no sample."""

    pattern: str
    trace: str
    """File that was written. Empty: none, as no request was answered."""
    digest: str
    """Workload's: equal digests, equal planned traffic."""
    sent_digest: str | None
    """Of the sent bodies: equal if responses were too. Null: a process died with its share."""
    interrupted: str | None
    """Reason; null: not cut short."""
    failures: list[str]
    seconds: float
    sent: int
    statuses: dict[str, int]
    errors: dict[str, int]
    """By kind."""
    metrics: TraceMetrics | None
    """Of the whole trace, as ``report show`` has them. Null: there is none."""
    client_cpu: float
    """CPU time of all processes over the run's length, in cores."""
    processes: list[ProcessUse]
    forms: str
    """``compiled`` or ``python``: the parser of events, which has both forms (``wire/native.py``)."""
    findings: dict[str, int]
    prefix_truth: TruthReport | None = None
    """Check of prompts in the target's tokens; null: not checked."""
    counters_before: PrefixCounters | None
    counters_after: PrefixCounters | None
    """The engine's prefix cache counters, in tokens."""
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Ending:
    """Run that was sent: its outcome, and the summary with the metrics of its trace."""

    outcome: RunOutcome
    summary: Summary
    lacking: InputError | None = None
    """Error of an SLO on a metric that the trace lacks: raised once everything else is told."""

    def exit_code(self) -> int:
        """Return 1 if nothing ended well or an SLO is missed, 130 if cut short, else 0; raises ``lacking``."""
        if self.lacking is not None:
            raise self.lacking
        metrics = self.summary.metrics
        missed = metrics is not None and not all(slo.met for slo in metrics.slos)
        return exit_code(self.outcome) or int(missed)


def end_run(
    outcome: RunOutcome,
    trace: Path,
    flags: RunFlags,
    *,
    pattern: str,
    facts: tuple[EngineFacts, EngineFacts],
    notes: list[str],
    prefix_truth: TruthReport | None = None,
) -> Ending:
    """Measure the run's trace and sum the run up. ``facts``: the engine's before and after it."""
    run = load_run(trace.name, trace, named=False, reuse=True) if outcome.tally.ended and outcome.kept else None
    metrics, lacking = _measured(run, flags)
    notes = [*length_notes(run, outcome, facts[0].engine.max_model_len), *notes]
    summary = summarize(outcome, metrics, pattern=pattern, trace=trace, facts=facts, notes=notes)
    return Ending(outcome, msgspec.structs.replace(summary, prefix_truth=prefix_truth), lacking)


def _measured(run: Run | None, flags: RunFlags) -> tuple[TraceMetrics | None, InputError | None]:
    if run is None:
        return None, None
    try:
        return measure_run(run, slos=flags.slos), None
    except InputError as error:
        return measure_run(run), error


def length_notes(run: Run | None, outcome: RunOutcome, most: int | None) -> list[str]:
    """Note on refused requests that ask for more tokens than ``most``, the engine's ``max_model_len``."""
    refused = outcome.tally.errors["http_400"]
    if run is None or most is None or not refused:
        return []
    asked = np.maximum(run.prompt_tokens, run.planned_prompt_tokens) + run.max_tokens
    longer = min(int(((run.status == STATUSES.index("error")) & (asked > most)).sum()), refused)
    told = f"longer than the engine's max_model_len of {most:,} tokens, prompt and output together"
    return [f"{longer} of {refused} requests refused with HTTP 400 are {told}"] if longer else []


def summarize(
    outcome: RunOutcome,
    metrics: TraceMetrics | None,
    *,
    pattern: str,
    trace: Path,
    facts: tuple[EngineFacts, EngineFacts],
    notes: list[str],
) -> Summary:
    """``facts``: the engine's before and after the run."""
    tally, processes = outcome.tally, processes_of(outcome)
    return Summary(
        pattern=pattern,
        trace=str(trace) if outcome.kept else "",
        digest=outcome.digest,
        sent_digest=outcome.sent_digest,
        interrupted=outcome.stopped,
        failures=outcome.failures,
        seconds=round(outcome.seconds, 3),
        sent=tally.started,
        statuses=dict(tally.statuses),
        errors=dict(tally.errors),
        metrics=metrics,
        client_cpu=round(sum(process.cpu for process in processes), 4),
        processes=processes,
        forms=forms(),
        findings=outcome.findings,
        counters_before=facts[0].counters,
        counters_after=facts[1].counters,
        notes=[*busy_notes(processes, outcome.seconds), *notes],
    )


def processes_of(outcome: RunOutcome) -> list[ProcessUse]:
    return [
        ProcessUse(f"{name} {index}", shard.where, round(cpu_s, 3), round(cpu_s / outcome.seconds, 4))
        for index, shard in enumerate(outcome.shards)
        for name, cpu_s in (("shard", shard.shard_cpu_s), ("sender", shard.sender_cpu_s))
        if outcome.seconds
    ]


def busy_notes(processes: Sequence[ProcessUse], seconds: float) -> list[str]:
    return [
        f"client busy: its {process.process} used {process.cpu:.0%} of a core; give it less load, or more --procs"
        for process in processes
        if process.cpu > CPU_LIMIT and seconds > SHORT_S
    ]


def summary_lines(summary: Summary, more: Sequence[str] = ()) -> list[str]:
    """Lines for a terminal; ``more``: lines of the command."""
    ended = ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items()))
    lines = [
        f"{summary.pattern}: {summary.sent} sent in {summary.seconds:.1f} s: {ended or 'none ended'}"
        + (f"; cut short ({summary.interrupted})" if summary.interrupted else ""),
    ]
    lines += [f"  FAILED: {failure}" for failure in summary.failures]
    if summary.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.errors.items()))
        lines.append(f"  errors              {kinds}")
    lines += [f"  {line}" for line in (*_counted(summary), *more)]
    lines += [f"  note: {note}" for note in summary.notes]
    return lines if summary.metrics is None else [*lines, *metric_lines(summary.metrics)]


def _counted(summary: Summary) -> list[str]:
    lines = [
        f"client              {_cpu(summary)} of a core{_held(summary.metrics)}",
        f"trace               {summary.trace or 'none: no request was answered'}",
        f"workload            {summary.digest}",
        f"sent                {summary.sent_digest or 'unknown: a process died'}",
    ]
    before, after = summary.counters_before, summary.counters_after
    if before is not None and after is not None:
        hits, queries = after.hits - before.hits, after.queries - before.queries
        lines.append(f"engine's counters   {hits} of {queries} tokens looked up were hits")
    return lines


def _held(metrics: TraceMetrics | None) -> str:
    return f"; {metrics.client.held} queued by the concurrency limit" if metrics is not None else ""


def _cpu(summary: Summary) -> str:
    """Busiest process of each kind; the JSON has all."""
    used = [
        (name, [use.cpu for use in summary.processes if use.process.startswith(name)]) for name in ("shard", "sender")
    ]
    return ", ".join(f"{name} {max(cpus):.0%}" for name, cpus in used if cpus) or "nothing"
