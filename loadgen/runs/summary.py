"""Summary of a run for terminal and JSON: results, and whether the client was fit to measure."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engines.facts import EngineFacts, PrefixCounters
from loadgen.core.capacity import load_capacity
from loadgen.runs.outcome import RunOutcome
from loadgen.text.prefixtruth import TruthReport
from measure.lateness import LAG_LEVEL, late_limit_ms
from measure.samples import Sample

CPU_LIMIT = 0.9
OFFERED_LIMIT = 0.8
"""Share of the machine's capacity; beyond it, bursts exceed the capacity."""
SHORT_S = 2.0
"""In shorter runs, start-up outweighs sending."""


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of a sample, in ms."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class Lateness(msgspec.Struct, frozen=True):
    """Lateness of the client's sends; requests queued by the concurrency limit are not counted."""

    limit_ms: float
    """Lag above this is late."""
    requests: int
    share: float | None
    """Of the requests not queued by ``--parallel``; null: none."""
    run: bool
    """True if the p99 lag is above the limit: the run's latencies are not to be trusted."""


class Throughput(msgspec.Struct, frozen=True):
    """Per second of the run, from t = 0 to the last end."""

    requests: float
    """Completed requests."""
    prompt_tokens: float
    output_tokens: float


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
    """File that was written."""
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
    throughput: Throughput | None
    ttft: Quantiles | None
    """From send to first token."""
    ttft_from_schedule: Quantiles | None
    """From the schedule: it includes the client's lateness."""
    itl: Quantiles | None
    """Gap over tokens of every later read."""
    tpot: Quantiles | None
    """Sum of a request's gaps over its tokens after the first read."""
    e2e: Quantiles | None
    """Over completed requests."""
    lag: Quantiles | None
    """Send minus schedule, over requests that did not wait for a slot."""
    lateness: Lateness
    loop_delay: Quantiles | None
    """Lateness of timers in the senders: the delay of a read's time stamp."""
    queued: int
    """Requests that waited for ``--parallel``."""
    prompt_tokens: int
    output_tokens: int
    exact_output_share: float | None
    """Share of completed requests with the output length asked for."""
    cached_share: float | None
    """Cached over prompt tokens; null: never reported."""
    cached_reported: int
    """Requests with reported cached tokens."""
    client_cpu: float
    """CPU time of all processes over the run's length, in cores."""
    processes: list[ProcessUse]
    offered_share: float | None
    """Share of this machine's capacity (``loadgen selftest``); null: not measured, or sent from other machines."""
    findings: dict[str, int]
    prefix_truth: TruthReport | None = None
    """Check of prompts in the target's tokens; null: not checked."""
    counters_before: PrefixCounters | None
    counters_after: PrefixCounters | None
    """The engine's prefix cache counters, in tokens."""
    notes: list[str]


def summarize(
    outcome: RunOutcome,
    *,
    pattern: str,
    trace: Path,
    facts: tuple[EngineFacts, EngineFacts],
    notes: list[str],
) -> Summary:
    """``facts``: the engine's before and after the run."""
    tally = outcome.tally
    lag, ttft = quantiles(tally.lag_ms), quantiles(tally.ttft_ms)
    lateness, processes = lateness_of(tally.lag_ms, ttft), processes_of(outcome)
    offered = offered_share(outcome)
    return Summary(
        pattern=pattern,
        trace=str(trace),
        digest=outcome.digest,
        sent_digest=outcome.sent_digest,
        interrupted=outcome.stopped,
        failures=outcome.failures,
        seconds=round(outcome.seconds, 3),
        sent=tally.started,
        statuses=dict(tally.statuses),
        errors=dict(tally.errors),
        throughput=throughput_of(outcome),
        ttft=ttft,
        ttft_from_schedule=quantiles(tally.ttft_from_schedule_ms),
        itl=quantiles(tally.itl_ms),
        tpot=quantiles(tally.tpot_ms),
        e2e=quantiles(tally.e2e_ms),
        lag=lag,
        lateness=lateness,
        loop_delay=quantiles(outcome.loop_delay_ms),
        queued=tally.held,
        prompt_tokens=tally.prompt_tokens,
        output_tokens=tally.output_tokens,
        exact_output_share=share(tally.exact_output, tally.statuses["ok"]),
        cached_share=share(tally.cached_tokens, tally.looked_up_tokens),
        cached_reported=tally.cached_reported,
        client_cpu=round(sum(process.cpu for process in processes), 4),
        processes=processes,
        offered_share=offered,
        findings=outcome.findings,
        counters_before=facts[0].counters,
        counters_after=facts[1].counters,
        notes=[*busy_notes(processes, outcome.seconds), *limit_notes(offered), *notes],
    )


def quantiles(sample: Sample) -> Quantiles | None:
    if not sample.count:
        return None
    p50, p90, p99 = (round(each, 3) for each in sample.quantiles(0.5, 0.9, 0.99))
    return Quantiles(sample.count, p50, p90, p99, round(sample.max, 3))


def lateness_of(lag_ms: Sample, ttft: Quantiles | None) -> Lateness:
    limit_ms = late_limit_ms(ttft.p50_ms if ttft else None)
    late = lag_ms.count_above(limit_ms)
    run = lag_ms.count > 0 and lag_ms.quantile(LAG_LEVEL) > limit_ms
    return Lateness(round(limit_ms, 3), late, share(late, lag_ms.count), run)


def throughput_of(outcome: RunOutcome) -> Throughput | None:
    """Null: the run took no time."""
    if not outcome.seconds:
        return None
    tally = outcome.tally
    amounts = (tally.statuses["ok"], tally.prompt_tokens, tally.output_tokens)
    return Throughput(*(round(amount / outcome.seconds, 3) for amount in amounts))


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


def offered_share(outcome: RunOutcome) -> float | None:
    """Mean share of this machine's capacity that the run offered; null: see ``Summary``."""
    local = all(shard.where.startswith("process ") for shard in outcome.shards)
    known = load_capacity(len(outcome.shards)) if local else None
    if known is None or not outcome.seconds:
        return None
    tally = outcome.tally
    return round(known.share(tally.started, tally.output_tokens, tally.prompt_tokens, outcome.seconds), 4)


def limit_notes(offered: float | None) -> list[str]:
    if offered is None or offered <= OFFERED_LIMIT:
        return []
    how = "more than" if offered > 1 else f"{offered:.0%} of what"
    said = f"the run offered {how} this machine can send (loadgen selftest)"
    return [f"client near its limit: {said}; give it less load, or more --procs"]


def share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def summary_lines(summary: Summary, more: Sequence[str] = ()) -> list[str]:
    """Lines for a terminal; ``more``: lines of the command."""
    ended = ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items()))
    lines = [
        f"{summary.pattern}: {summary.sent} sent in {summary.seconds:.1f} s: {ended or 'none ended'}"
        + (f"; cut short ({summary.interrupted})" if summary.interrupted else ""),
    ]
    lines += [f"  FAILED: {failure}" for failure in summary.failures]
    if summary.lag is not None and summary.lateness.run:
        lines.append(
            f"  CLIENT LATE: lag p99 {summary.lag.p99_ms:.1f} ms, {_late(summary)}; trust no latency of this run: "
            "repeat it on an idle machine; loadgen selftest tells what this one can send"
        )
    if summary.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.errors.items()))
        lines.append(f"  errors              {kinds}")
    for name, found in _timed(summary):
        if found is not None:
            lines.append(
                f"  {name:<19} p50 {found.p50_ms:>9.2f}  p90 {found.p90_ms:>9.2f}  p99 {found.p99_ms:>9.2f}"
                f"  max {found.max_ms:>9.2f} ms  n {found.count}"
            )
    lines += [f"  {line}" for line in (*_counted(summary), *more)]
    return lines + [f"  note: {note}" for note in summary.notes]


def _timed(summary: Summary) -> list[tuple[str, Quantiles | None]]:
    return [
        ("TTFT", summary.ttft),
        ("TTFT from schedule", summary.ttft_from_schedule),
        ("ITL", summary.itl),
        ("TPOT", summary.tpot),
        ("end to end", summary.e2e),
        ("lag", summary.lag),
        ("loop delay", summary.loop_delay),
    ]


def _counted(summary: Summary) -> list[str]:
    cached = "not reported"
    if summary.cached_share is not None:
        cached = f"{summary.cached_share:.1%} of prompt tokens (reported for {summary.cached_reported})"
    exact = "none" if summary.exact_output_share is None else f"{summary.exact_output_share:.1%}"
    lines = [
        f"cached              {cached}",
        f"output              {summary.output_tokens} tokens; completed requests with the length asked for: {exact}",
    ]
    if (done := summary.throughput) is not None:
        lines.append(
            f"throughput          {done.requests:.1f} completed requests, {done.prompt_tokens:.0f} prompt and "
            f"{done.output_tokens:.0f} output tokens a second"
        )
    if summary.offered_share is not None:
        lines.append(
            f"offered             {summary.offered_share:.0%} of what this machine can send (loadgen selftest)"
        )
    lines += [
        f"client              {_late(summary)}; {_cpu(summary)} of a core; "
        f"{summary.queued} queued by the concurrency limit",
        f"trace               {summary.trace}",
        f"workload            {summary.digest}",
        f"sent                {summary.sent_digest or 'unknown: a process died'}",
    ]
    before, after = summary.counters_before, summary.counters_after
    if before is not None and after is not None:
        hits, queries = after.hits - before.hits, after.queries - before.queries
        lines.append(f"engine's counters   {hits} of {queries} tokens looked up were hits")
    return lines


def _late(summary: Summary) -> str:
    late = summary.lateness
    return f"{late.requests} requests late by more than {late.limit_ms:.1f} ms"


def _cpu(summary: Summary) -> str:
    """Busiest process of each kind; the JSON has all."""
    used = [
        (name, [use.cpu for use in summary.processes if use.process.startswith(name)]) for name in ("shard", "sender")
    ]
    return ", ".join(f"{name} {max(cpus):.0%}" for name, cpus in used if cpus) or "nothing"


def print_summary(summary: msgspec.Struct, lines: list[str], *, as_json: bool) -> None:
    """Print lines; with ``as_json`` one object on stdout, and the lines on stderr."""
    print("\n".join(lines), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
