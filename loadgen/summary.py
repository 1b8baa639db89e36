"""What a run says of itself at its end, to people and as JSON: results, and whether the client was fit to measure."""

import msgspec

from loadgen.samples import Sample
from loadgen.tally import Tally
from tracefile.enginefacts import PrefixCounters

LAG_LIMIT_MS = 5.0
LAG_LIMIT_OF_TTFT = 0.01
CPU_LIMIT = 0.9


class Quantiles(msgspec.Struct, frozen=True):
    """Of one sample, in ms."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run; null where there is no sample."""

    pattern: str
    digest: str
    """The workload's."""
    interrupted: str | None
    """Why the run was cut short; null: it was not."""
    seconds: float
    sent: int
    statuses: dict[str, int]
    errors: dict[str, int]
    """By kind."""
    ttft: Quantiles | None
    """From the send, over requests whose first token came."""
    ttft_from_schedule: Quantiles | None
    """From when the request should have been sent: a late client cannot hide in it."""
    itl: Quantiles | None
    """Gap over tokens of every later read."""
    e2e: Quantiles | None
    """Over requests that ended well."""
    lag: Quantiles | None
    """Send minus schedule, over requests that did not wait for a slot."""
    held: int
    """How many waited for a slot of ``--parallel``."""
    output_tokens: int
    exact_output_share: float | None
    """Of the requests that ended well, those with as many output tokens as asked for."""
    cached_share: float | None
    """Cached over prompt tokens, where the engine reported them; null: it never did."""
    cached_reported: int
    """For how many requests it did."""
    client_cpu: float
    """CPU time of this process over the run's length; 1 is a whole core."""
    counters_before: PrefixCounters | None
    counters_after: PrefixCounters | None
    """The engine's own prefix cache counters, in tokens."""
    notes: list[str]
    """What a reader should know before trusting the numbers."""


def quantiles(sample: Sample) -> Quantiles | None:
    """Of a sample; null: it is empty."""
    if not sample.count:
        return None
    p50, p90, p99 = (round(sample.quantile(each), 3) for each in (0.5, 0.9, 0.99))
    return Quantiles(sample.count, p50, p90, p99, round(sample.max, 3))


def lateness_notes(lag: Quantiles | None, ttft: Quantiles | None, client_cpu: float) -> list[str]:
    """Why this client may have disturbed what it measured; empty: no reason found."""
    notes = []
    limit_ms = max(LAG_LIMIT_MS, LAG_LIMIT_OF_TTFT * ttft.p50_ms if ttft else 0.0)
    if lag is not None and lag.p99_ms > limit_ms:
        notes.append(f"client late: lag p99 {lag.p99_ms:.1f} ms is above {limit_ms:.1f} ms; trust no latency here")
    if client_cpu > CPU_LIMIT:
        notes.append(f"client busy: it used {client_cpu:.0%} of a core; give it less load, or the machine more room")
    return notes


def share(part: int, whole: int) -> float | None:
    """A share; null: of nothing."""
    return round(part / whole, 6) if whole else None


def summarize(
    tally: Tally,
    *,
    pattern: str,
    digest: str,
    interrupted: str | None,
    seconds: float,
    cpu_s: float,
    counters: tuple[PrefixCounters | None, PrefixCounters | None],
    notes: list[str],
) -> Summary:
    """The summary of a run that is over."""
    lag, ttft = quantiles(tally.lag_ms), quantiles(tally.ttft_ms)
    client_cpu = round(cpu_s / seconds, 4) if seconds else 0.0
    return Summary(
        pattern=pattern,
        digest=digest,
        interrupted=interrupted,
        seconds=round(seconds, 3),
        sent=tally.started,
        statuses=dict(tally.statuses),
        errors=dict(tally.errors),
        ttft=ttft,
        ttft_from_schedule=quantiles(tally.ttft_from_schedule_ms),
        itl=quantiles(tally.itl_ms),
        e2e=quantiles(tally.e2e_ms),
        lag=lag,
        held=tally.held,
        output_tokens=tally.output_tokens,
        exact_output_share=share(tally.exact_output, tally.statuses["ok"]),
        cached_share=share(tally.cached_tokens, tally.looked_up_tokens),
        cached_reported=tally.cached_reported,
        client_cpu=client_cpu,
        counters_before=counters[0],
        counters_after=counters[1],
        notes=[*lateness_notes(lag, ttft, client_cpu), *notes],
    )


def summary_lines(summary: Summary) -> list[str]:
    """The summary for a terminal."""
    ended = ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items()))
    lines = [
        f"{summary.pattern}: {summary.sent} sent in {summary.seconds:.1f} s: {ended or 'none ended'}"
        + (f"; cut short ({summary.interrupted})" if summary.interrupted else ""),
    ]
    if summary.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.errors.items()))
        lines.append(f"  errors              {kinds}")
    for name, found in _timed(summary):
        if found is not None:
            lines.append(
                f"  {name:<19} p50 {found.p50_ms:>9.2f}  p90 {found.p90_ms:>9.2f}  p99 {found.p99_ms:>9.2f}"
                f"  max {found.max_ms:>9.2f} ms  n {found.count}"
            )
    lines += [f"  {line}" for line in _counted(summary)]
    return lines + [f"  note: {note}" for note in summary.notes]


def _timed(summary: Summary) -> list[tuple[str, Quantiles | None]]:
    return [
        ("TTFT", summary.ttft),
        ("TTFT from schedule", summary.ttft_from_schedule),
        ("ITL", summary.itl),
        ("end to end", summary.e2e),
        ("lag", summary.lag),
    ]


def _counted(summary: Summary) -> list[str]:
    cached = "not reported"
    if summary.cached_share is not None:
        cached = f"{summary.cached_share:.1%} of prompt tokens (reported for {summary.cached_reported})"
    exact = "none" if summary.exact_output_share is None else f"{summary.exact_output_share:.1%}"
    lines = [
        f"cached              {cached}",
        f"output              {summary.output_tokens} tokens; of whole answers, as long as asked: {exact}",
        f"client              {summary.client_cpu:.0%} of a core, {summary.held} held back by --parallel",
        f"workload            {summary.digest}",
    ]
    before, after = summary.counters_before, summary.counters_after
    if before is not None and after is not None:
        hits, queries = after.hits - before.hits, after.queries - before.queries
        lines.append(f"engine's counters   {hits} of {queries} tokens looked up were hits")
    return lines
