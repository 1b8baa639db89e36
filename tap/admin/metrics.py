"""Prometheus metrics of the tap: requests, TTFT, ITL, prompt and cached tokens, upstreams, processes."""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric

from measure.exposition import Families
from measure.histogram import GAP_S, WAIT_S
from tap.admin.state import TapStats
from tap.ipc.messages import Progress, WorkerStats

TAP: Final = Families("kvtape_tap_")
WORKER_COUNTERS: Final = {
    "relayed": "Relayed requests, recorded or not.",
    "bytes_in": "Bytes of request bodies.",
    "bytes_out": "Bytes of response bodies.",
}
WORKER_GAUGES: Final = {
    "in_flight": "Recorded requests in flight.",
    "connections": "Open client connections.",
    "queue_bytes": "Memory of captures in flight and queued for the recorder.",
    "queue_limit_bytes": "Memory limit beyond which captures are dropped.",
    "loop_delay_s": "Largest event loop delay of the last second.",
}
UPSTREAM_COUNTERS: Final = {
    "requests": "Requests sent to the upstream.",
    "ejections": "Ejections of the upstream after failures.",
    "prompt_bytes": "Bytes of prompt prefixes that routing hashed.",
    "hit_bytes": "Bytes of prompt prefixes that were sent to the upstream before (prefix hits).",
}
NAMES: Final = {
    **{"bytes_in": "received_bytes", "bytes_out": "sent_bytes", "hit_bytes": "known_bytes"},
    "loop_delay_s": "loop_delay_seconds",
}
"""Metric names that differ from their fields."""


def tap_metrics(stats: TapStats) -> Iterator[Metric]:
    yield TAP.gauge("ready", "1 if /readyz returns 200.", [((), not stats.not_ready_reasons())])
    recording = [((), not stats.not_recording_reasons())]
    yield TAP.gauge("recording", "1 if requests are recorded, whether ready or not.", recording)
    up = [((origin,), reached) for origin, reached in sorted(stats.reachable.items())]
    yield TAP.gauge("upstream_up", "1 if the last connection attempt to the upstream succeeded.", up, ["upstream"])
    yield from _service_metrics(stats)
    yield from _worker_metrics(sorted(stats.worker_stats, key=lambda worker: worker.worker))
    serving = [((name,), name not in stats.ejected) for name in stats.upstreams]
    yield TAP.gauge("upstream_serving", "1 if the upstream is not ejected.", serving, ["upstream"])
    yield from _recorder_metrics(stats.progress)


def _service_metrics(stats: TapStats) -> Iterator[Metric]:
    yield TAP.counter("offered", "Requests to record.", [((), stats.offered)])
    dropped = [((reason,), count) for reason, count in sorted(stats.dropped.items())]
    yield TAP.counter("dropped", "Requests without a record, by reason.", dropped, ["reason"])
    yield TAP.gauge("workers", "Configured worker processes.", [((), stats.workers)])
    yield TAP.gauge("workers_up", "Worker processes that are ready.", [((), stats.workers_up)])
    yield TAP.counter("worker_restarts", "Worker restarts after a crash.", [((), stats.worker_restarts)])
    yield TAP.gauge("recorder_up", "1 if the recorder process is up.", [((), stats.recorder_up)])
    yield TAP.counter("recorder_restarts", "Recorder restarts after a crash.", [((), stats.recorder_restarts)])


def _worker_metrics(workers: Sequence[WorkerStats]) -> Iterator[Metric]:
    for family, fields in ((TAP.counter, WORKER_COUNTERS), (TAP.gauge, WORKER_GAUGES)):
        for field, text in fields.items():
            rows = [((str(worker.worker),), getattr(worker, field)) for worker in workers]
            yield family(NAMES.get(field, field), text, rows, ["worker"])
    upstreams = [((str(worker.worker), counts.upstream), counts) for worker in workers for counts in worker.upstreams]
    labels = ["worker", "upstream"]
    for field, text in UPSTREAM_COUNTERS.items():
        samples = [(values, getattr(counts, field)) for values, counts in upstreams]
        yield TAP.counter(f"upstream_{NAMES.get(field, field)}", text, samples, labels)
    in_flight = [(values, counts.in_flight) for values, counts in upstreams]
    yield TAP.gauge("upstream_in_flight", "Requests in flight, recorded or not.", in_flight, labels)
    failures = [((str(stat.worker), name), n) for stat in workers for name, n in sorted(stat.misrouted.items())]
    yield TAP.counter("misrouted", "Exceptions of the routing policy, by type.", failures, ["worker", "reason"])


def _recorder_metrics(progress: Progress) -> Iterator[Metric]:
    numbers = progress.numbers
    requests = [((row.endpoint, row.status, str(row.http_status), row.upstream), row.count) for row in numbers.requests]
    labels = ["endpoint", "status", "http_status", "upstream"]
    yield TAP.counter("requests", "Records by endpoint, outcome, HTTP status (0: none) and upstream.", requests, labels)
    yield TAP.histogram("ttft_seconds", "TTFT: arrival to first token.", WAIT_S, [((), numbers.ttft)])
    yield TAP.histogram("itl_seconds", "ITL: gap between reads that carry tokens.", GAP_S, [((), numbers.gaps)])
    written = progress.recorded + progress.dropped.get("trace_lost", 0)  # a counter never decreases
    for name, text, count in (
        ("recorded", "Records written to files, lost records (trace_lost) included.", written),
        ("hashed", "Records with block hashes.", progress.hashed),
        ("prompt_counts_checked", "Records with both prompt token ids and usage.", progress.prompt_counts_checked),
        ("prompt_counts_matched", "Records whose prompt tokens equal usage.", progress.prompt_counts_matched),
        ("prompt_tokens", "Prompt tokens of records.", numbers.prompt_tokens),
        ("cached_tokens", "Cached prompt tokens of records (prefix hits).", numbers.cached_tokens),
        ("output_tokens", "Output tokens of records.", numbers.output_tokens),
        ("segments_deleted", "Segments deleted by --keep.", progress.deleted),
        ("uploads", "Segments uploaded.", progress.uploaded),
        ("upload_failures", "Failed upload attempts.", progress.upload_failed),
    ):
        yield TAP.counter(name, text, [((), count)])
    unhashed = [((reason,), count) for reason, count in sorted(progress.unhashed.items())]
    yield TAP.counter("unhashed", "Records without block hashes.", unhashed, ["reason"])
    yield TAP.gauge("segments", "Files of the trace.", [((), progress.segments - progress.deleted)])
    yield TAP.gauge("recorder_writing", "1 if the last flush reached the files.", [((), progress.writing)])
