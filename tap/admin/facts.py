"""Named numbers of the recording and of the tap's processes, for the live page."""

from measure import wording
from measure.histogram import OVERHEAD_S, HistogramCounts, add_counts, empty_counts, quantile_bound
from tap.admin.snapshot import Fact
from tap.admin.state import LiveState
from tap.ipc.feed import RecorderStats


def recorder_facts(state: LiveState) -> list[Fact]:
    """Return the numbers of the recording."""
    recorder = state.recorder
    if recorder is None:
        return []
    progress = recorder.progress
    unhashed = ", ".join(f"{reason} {wording.count(count)}" for reason, count in sorted(progress.unhashed.items()))
    matched, checked = progress.prompt_counts_matched, progress.prompt_counts_checked
    facts = [
        Fact("Recorded", wording.count(progress.recorded)),
        Fact("Sampled out", wording.count(progress.sampled_out)),
        Fact(
            "Hashed", wording.share_of(progress.hashed, progress.recorded) + (f" (not: {unhashed})" if unhashed else "")
        ),
        Fact("Prompt lengths as in usage", f"{wording.share_of(matched, checked)} of {wording.count(checked)}"),
        Fact("Writing", "yes" if recorder.writing else "no: the trace cannot be written", not recorder.writing),
        Fact("Segments", _segments_text(recorder), progress.upload_failed > 0),
    ]
    if recorder.feed_skipped:
        facts.append(Fact("Not shown on this page", f"{wording.count(recorder.feed_skipped)} records"))
    return facts


def drop_facts(state: LiveState) -> list[Fact]:
    """Return the exchanges without a record, by reason."""
    return [Fact(reason, wording.count(count), True) for reason, count in sorted(state.dropped.items())]


def process_facts(state: LiveState) -> list[Fact]:
    """Return the state of the tap's processes, and the time that they add."""
    facts = []
    service = state.service
    if service is not None:
        up, restarts = f"{service.workers_up} of {service.workers} up", _restarts_text(service.worker_restarts)
        facts.append(Fact("Workers", up + restarts, service.workers_up < service.workers))
        recorder = "up" if service.recorder_up else "down"
        facts.append(Fact("Recorder", recorder + _restarts_text(service.recorder_restarts), not service.recorder_up))
    for origin, reached in sorted(state.reachable.items()):
        facts.append(Fact(origin, "takes connections" if reached else "does not take connections", not reached))
    workers = state.workers.values()
    if workers:
        facts.append(
            Fact("Event loop late by at most", wording.duration(1e3 * max(one.loop_delay_s for one in workers)))
        )
    return facts + _overhead_facts(state)


def _overhead_facts(state: LiveState) -> list[Fact]:
    response_head, chunk = empty_counts(OVERHEAD_S), empty_counts(OVERHEAD_S)
    for worker in state.workers.values():
        add_counts(response_head, worker.response_head)
        add_counts(chunk, worker.chunk)
    parts = [("Added to a response's head", response_head), ("Added to a read of a stream", chunk)]
    if state.recorder is not None:
        parts.insert(0, ("Added to a request's head", state.recorder.request_head))
    return [Fact(f"{name}, p50 · p99", text) for name, counts in parts if (text := _bounds_text(counts)) is not None]


def _bounds_text(counts: HistogramCounts) -> str | None:
    """Return the bounds of the p50 and the p99; null for no values."""
    return f"≤ {_bound_text(counts, 0.5)} · ≤ {_bound_text(counts, 0.99)}" if counts.count else None


def _bound_text(counts: HistogramCounts, level: float) -> str:
    bound_s = quantile_bound(OVERHEAD_S, counts, level)
    if bound_s <= OVERHEAD_S[-1]:
        return wording.duration(1e3 * bound_s)
    return f"more than {wording.duration(1e3 * OVERHEAD_S[-1])}"


def _segments_text(recorder: RecorderStats) -> str:
    progress = recorder.progress
    text = wording.count(progress.segments)
    if progress.uploaded or progress.upload_failed:
        text += f", {wording.count(progress.uploaded)} uploaded"
    if progress.upload_failed:
        text += f", {wording.count(progress.upload_failed)} failed tries"
    return text


def _restarts_text(restarts: int) -> str:
    return f", restarted {restarts} time{'s' if restarts > 1 else ''}" if restarts else ""
