"""Summary of a run for terminal and JSON: metrics of its trace, and load of the client."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from engines.facts import EngineFacts, PrefixCounters
from loadgen.core.settings import RunSettings
from loadgen.runs.outcome import RunOutcome, exit_code
from loadgen.text.prompt_token_check import PromptTokenReport
from measure.metrics.results import TraceMetrics
from measure.metrics.tables import metric_lines
from measure.metrics.trace import measure_run
from measure.runs import STATUSES, Run, load_run
from tracefile.records.errors import InputError

CPU_LIMIT = 0.9
SHORT_S = 2.0
"""In shorter runs, start-up outweighs sending."""


class ProcessUse(msgspec.Struct, frozen=True):
    """CPU use of one client process."""

    process: str
    """``worker 0`` …"""
    where: str
    cpu_s: float
    cpu: float
    """CPU time over the run's length, in cores."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run: requests, tokens, latency and throughput metrics; null where there is no sample."""

    pattern: str
    trace: str
    """Written file. Empty: none, because no request was answered."""
    digest: str
    """Digest of the workload; equal digests: equal planned requests."""
    interrupted: str | None
    """Reason; null: not interrupted."""
    failures: list[str]
    seconds: float
    sent: int
    statuses: dict[str, int]
    errors: dict[str, int]
    """Counts of errors by kind."""
    metrics: TraceMetrics | None
    """Metrics of the complete trace, as in ``report show``. Null: no trace."""
    client_cpu: float
    """CPU time of all processes over the run's length, in cores."""
    processes: list[ProcessUse]
    findings: dict[str, int]
    prompt_check: PromptTokenReport | None = None
    """Check of prompt tokens against the plan; null: not checked."""
    counters_before: PrefixCounters | None
    counters_after: PrefixCounters | None
    """The engine's prefix cache counters, in tokens."""
    notes: list[str]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run: its outcome, and the summary with the latency and throughput metrics of its trace."""

    outcome: RunOutcome
    summary: Summary
    missing_metric: InputError | None = None
    """Error of an SLO on a metric that the trace lacks: raised after the summary is printed."""

    def exit_code(self) -> int:
        """1 if no request succeeded or an SLO is missed, 130 if interrupted, else 0; raises ``missing_metric``."""
        if self.missing_metric is not None:
            raise self.missing_metric
        metrics = self.summary.metrics
        missed = metrics is not None and not all(slo.met for slo in metrics.slos)
        return exit_code(self.outcome) or int(missed)


def end_run(
    outcome: RunOutcome,
    settings: RunSettings,
    *,
    pattern: str,
    facts: tuple[EngineFacts, EngineFacts],
    notes: list[str],
    prompt_check: PromptTokenReport | None = None,
) -> RunResult:
    """Measure latency and throughput of the run's trace. ``facts``: of the engine before and after the run."""
    trace = settings.trace
    run = load_run(trace.name, trace, named=False, reuse=True) if outcome.tally.ended and outcome.has_trace else None
    metrics, missing_metric = None, None
    try:
        metrics = None if run is None else measure_run(run, slos=settings.slos)
    except InputError as error:
        metrics, missing_metric = None if run is None else measure_run(run), error
    tally, processes = outcome.tally, processes_of(outcome)
    most = facts[0].engine.max_model_len
    summary = Summary(
        pattern=pattern,
        trace=str(trace) if outcome.has_trace else "",
        digest=outcome.digest,
        interrupted=outcome.stopped,
        failures=outcome.failures,
        seconds=round(outcome.seconds, 3),
        sent=tally.started,
        statuses=dict(tally.statuses),
        errors=dict(tally.errors),
        metrics=metrics,
        client_cpu=round(sum(process.cpu for process in processes), 4),
        processes=processes,
        findings=outcome.findings,
        prompt_check=prompt_check,
        counters_before=facts[0].counters,
        counters_after=facts[1].counters,
        notes=[*busy_notes(processes, outcome.seconds), *length_notes(run, outcome, most), *notes],
    )
    return RunResult(outcome, summary, missing_metric)


def length_notes(run: Run | None, outcome: RunOutcome, most: int | None) -> list[str]:
    """Note on refused requests that ask for more tokens than ``most``, the engine's ``max_model_len``."""
    refused = outcome.tally.errors["http_400"]
    if run is None or most is None or not refused:
        return []
    requested = np.maximum(run.prompt_tokens, run.planned_prompt_tokens) + run.max_tokens
    longer = min(int(((run.status == STATUSES.index("error")) & (requested > most)).sum()), refused)
    reason = f"longer than the engine's max_model_len of {most:,} tokens, prompt and output together"
    return [f"{longer} of {refused} requests refused with HTTP 400 are {reason}"] if longer else []


def processes_of(outcome: RunOutcome) -> list[ProcessUse]:
    seconds = outcome.seconds
    return [
        ProcessUse(f"worker {index}", where, round(cpu_s, 3), round(cpu_s / seconds, 4))
        for index, (where, cpu_s) in enumerate(outcome.cpu_s)
        if seconds
    ]


def busy_notes(processes: Sequence[ProcessUse], seconds: float) -> list[str]:
    return [
        f"client busy: {process.process} used {process.cpu:.0%} of a core; use less load or more --procs"
        for process in processes
        if process.cpu > CPU_LIMIT and seconds > SHORT_S
    ]


def summary_lines(summary: Summary, more: Sequence[str] = ()) -> list[str]:
    """Lines for a terminal; ``more``: lines of the command."""
    ok = summary.statuses.get("ok", 0)
    not_ok = "".join(f", {count} {status}" for status, count in sorted(summary.statuses.items()) if status != "ok")
    verdict = f"stopped ({summary.interrupted})" if summary.interrupted else "done" if ok else "FAILED"
    lines = [f"{verdict}: {ok} of {summary.sent} requests ok in {summary.seconds:.1f} s{not_ok} ({summary.pattern})"]
    lines += [f"  FAILED: {failure}" for failure in summary.failures]
    if summary.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.errors.items()))
        lines.append(f"  errors              {kinds}")
    lines += [f"  {line}" for line in (*_counted(summary), *more)]
    lines += [f"  note: {note}" for note in summary.notes]
    lines += [] if summary.metrics is None else metric_lines(summary.metrics)
    return [*lines, f"next: report show {shlex.quote(summary.trace)}"] if summary.trace else lines


def _counted(summary: Summary) -> list[str]:
    busiest = max((process.cpu for process in summary.processes), default=0.0)
    queued = "" if summary.metrics is None else f"; {summary.metrics.client.held} queued by the concurrency limit"
    lines = [
        f"client              {busiest:.0%} of a core{queued}",
        f"trace               {summary.trace or 'none: no request was answered'}",
        f"workload            {summary.digest}",
    ]
    before, after = summary.counters_before, summary.counters_after
    if before is not None and after is not None:
        hits, queries = after.hits - before.hits, after.queries - before.queries
        lines.append(f"prefix cache        {hits} of {queries} tokens hit (engine counters)")
    return lines
